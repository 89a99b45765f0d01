#!/usr/bin/env python3
"""Measures belfry and its peers side by side, in turn, and prints ratios.

Each round runs ours and theirs once; figures are medians over the rounds. Peers are unmodified
programs of Debian: ucx_perftest (UCX over a shared mapping, and over tcp) and fi_pingpong
(libfabric, shm and tcp; Debian has no fabtests, and so no fi_rma_bw).

    bench/bars.py --build build/release [--rounds 5] [--json FILE]
"""
import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time


def fail(message):
    sys.exit(f"bars: {message}")


def run(command, env=None, timeout=120):
    result = subprocess.run(command, env={**os.environ, **(env or {})}, timeout=timeout,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        fail(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


def against_server(server, client, env=None):
    """Runs a client against a server program of its own; returns the client's output."""
    process = subprocess.Popen(server, env={**os.environ, **(env or {})},
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # neither program says when it listens
        return run(client, env)
    finally:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()


def ucx_put_latency():
    env = {"UCX_TLS": "posix,self"}
    out = against_server(["ucx_perftest", "-p", "13517"],
                         ["ucx_perftest", "127.0.0.1", "-p", "13517", "-t", "ucp_put_lat",
                          "-s", "8", "-n", "1000000"], env)
    return float(re.search(r"Final:\s+\d+\s+([\d.]+)", out).group(1))


def libfabric_latency():
    options = ["-p", "shm", "-e", "rdm", "-I", "100000", "-S", "64"]
    out = against_server(["fi_pingpong", *options], ["fi_pingpong", *options, "127.0.0.1"])
    line = [words for words in map(str.split, out.splitlines()) if words and words[0] == "64"]
    return float(line[-1][-2])


def ucx_tcp_bandwidth():
    env = {"UCX_TLS": "tcp,self"}
    out = against_server(["ucx_perftest", "-p", "13518"],
                         ["ucx_perftest", "127.0.0.1", "-p", "13518", "-t", "ucp_put_bw",
                          "-s", "65536", "-n", "20000"], env)
    # "Final: messages, overhead (3 columns), MB/s of the last second, MB/s overall, ..."
    return float(re.search(r"Final:\s+\d+((?:\s+[\d.]+){5})", out).group(1).split()[4]) * 2**20 / 1e9


def libfabric_tcp_bandwidth():
    options = ["-p", "tcp", "-e", "rdm", "-I", "5000", "-S", "65536"]
    out = against_server(["fi_pingpong", *options], ["fi_pingpong", *options, "127.0.0.1"])
    line = [words for words in map(str.split, out.splitlines()) if words and words[0] == "64k"]
    return float(line[-1][-3]) / 1e3


def our_fabric_bandwidth(belfry):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "bandwidth.json")
        run([belfry, "bench", "bandwidth", "--path", "proxy", "--sizes", "64K", "--json", file],
            {"BELFRY_PROVIDER": "fabric"})
        with open(file) as handle:
            return json.load(handle)["rows"][0]["p50"]


def ours(belfry):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "latency.json")
        run([belfry, "bench", "latency", "--path", "direct,lsa", "--sizes", "8",
             "--iterations", "100000", "--json", file])
        with open(file) as handle:
            rows = json.load(handle)["rows"]
    return {row["path"]: row for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release", help="where belfry was built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    belfry = os.path.join(options.build, "tools", "belfry", "belfry")
    for program in (belfry, "ucx_perftest", "fi_pingpong"):
        if shutil.which(program) is None:
            fail(f"{program} was not found; ./dev build makes belfry, "
                 "apt-get install ucx-utils libfabric-bin the peers")
    figures = {name: [] for name in ("lsa", "direct", "ucx", "libfabric",
                                     "fabric_gbs", "ucx_tcp_gbs", "libfabric_tcp_gbs")}
    for _ in range(options.rounds):
        mine = ours(belfry)
        figures["lsa"].append(mine["lsa"]["p50"])
        figures["ucx"].append(ucx_put_latency())
        figures["direct"].append(mine["direct"]["p50"])
        figures["libfabric"].append(libfabric_latency())
        figures["fabric_gbs"].append(our_fabric_bandwidth(belfry))
        figures["ucx_tcp_gbs"].append(ucx_tcp_bandwidth())
        figures["libfabric_tcp_gbs"].append(libfabric_tcp_bandwidth())
    medians = {name: statistics.median(values) for name, values in figures.items()}
    # Two cores of a virtual machine are neighbours at one time and not at another: the quartile is
    # of the rounds in which they were.
    quartiles = {name: sorted(values)[len(values) // 4] for name, values in figures.items()}
    rows = [("lsa, 8 B put+signal", "lsa", "UCX put, shared mapping, 8 B", "ucx", 1.5),
            ("direct through SoftNIC, 8 B put+signal", "direct",
             "libfabric shm, 64 B", "libfabric", 1.2)]
    print(f"one way, us, medians of {options.rounds} rounds side by side, 2 processes")
    for label, mine, peer, theirs, bar in rows:
        ratio = medians[mine] / medians[theirs]
        verdict = "met" if ratio <= bar else "NOT met"
        print(f"  {label:<40} {medians[mine]:8.3f}   {peer:<30} {medians[theirs]:8.3f}"
              f"   ratio {ratio:5.2f}, bar {bar}: {verdict};"
              f" lower quartiles {quartiles[mine]:.3f} / {quartiles[theirs]:.3f},"
              f" ratio {quartiles[mine] / quartiles[theirs]:.2f}")
    print("bandwidth over tcp, 64 KiB, GB/s, medians")
    for label, theirs in (("UCX tcp, put", "ucx_tcp_gbs"),
                          ("libfabric tcp, ping-pong", "libfabric_tcp_gbs")):
        ratio = medians["fabric_gbs"] / medians[theirs]
        verdict = "met" if ratio >= 0.8 else "NOT met"
        print(f"  {'proxy on fabric (tcp), puts':<40} {medians['fabric_gbs']:8.2f}   {label:<30}"
              f" {medians[theirs]:8.2f}   ratio {ratio:5.2f}, bar 0.8: {verdict}")
    if options.json:
        with open(options.json, "w") as handle:
            json.dump({"unit": "us", "rounds": options.rounds, "figures": figures,
                       "unit_gbs": "GB/s", "medians": medians, "lower_quartiles": quartiles}, handle, indent=2)


if __name__ == "__main__":
    main()
