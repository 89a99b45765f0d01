#!/usr/bin/env python3
"""Two network namespaces as two hosts, joined by a veth pair: provider fabric over tcp.

    two_hosts.py JOB_RANK CUT_RANK

The matrix's jobs over a link that drops 2 of 100 packets each way (nft); then a link that is cut
under way, and mended. Ends with 77 where namespaces or nft rules are not permitted.
"""
import os
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
NAMES = [f"belfry-{os.getpid()}-{end}" for end in "ab"]
PORT = 23000 + os.getpid() % 4000


def ip(*words):
    return subprocess.run(["ip", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True)


def join():
    commands = [("netns", "add", name) for name in NAMES]
    commands.append(("link", "add", "veth0", "netns", NAMES[0], "type", "veth",
                     "peer", "name", "veth0", "netns", NAMES[1]))
    for number, name in enumerate(NAMES, 1):
        commands += [("-n", name, "addr", "add", f"10.77.9.{number}/24", "dev", "veth0"),
                     ("-n", name, "link", "set", "veth0", "up"),
                     ("-n", name, "link", "set", "lo", "up")]
    for command in commands:
        done = ip(*command)
        if done.returncode != 0:
            print(f"skipped: ip {' '.join(command)}: {done.stderr.strip()}")
            sys.exit(SKIPPED)


def wait_for_links():
    end = time.monotonic() + 10
    for name in NAMES:
        while "state UP" not in subprocess.run(["ip", "-n", name, "link", "show", "veth0"],
                                               stdout=subprocess.PIPE, text=True).stdout:
            if time.monotonic() > end:
                sys.exit(f"the link of {name} did not come up within 10 s")
            time.sleep(0.05)


def drop(percent):
    for name in NAMES:
        rules = "flush ruleset\n"
        if percent:
            rules += ("table inet loss {\n chain in {\n type filter hook input priority 0\n"
                      ' iifname "veth0" ' +
                      ("" if percent == 100 else f"numgen random mod 100 < {percent} ") +
                      "drop\n }\n}\n")
        try:
            done = subprocess.run(["ip", "netns", "exec", name, "nft", "-f", "-"], input=rules,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except FileNotFoundError:
            sys.exit(SKIPPED)
        if done.returncode != 0:
            print(f"skipped: nft: {done.stdout.strip()}")
            sys.exit(SKIPPED)


def start(rank, argv, path, extra=None):
    environment = {**os.environ, "BELFRY_RANK": str(rank), "BELFRY_RANKS": "2",
                   "BELFRY_LOCAL_RANK": "0", "BELFRY_LOCAL_RANKS": "1",
                   "BELFRY_ROOT": f"10.77.9.1:{PORT}", "BELFRY_TOKEN": "two hosts",
                   "BELFRY_HOST_ID": NAMES[rank], "BELFRY_PROVIDER": "fabric",
                   "BELFRY_PATH": path, **(extra or {})}
    return subprocess.Popen(["ip", "netns", "exec", NAMES[rank], *argv], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(what, processes, seconds):
    end = time.monotonic() + seconds
    for rank, process in enumerate(processes):
        try:
            out, _ = process.communicate(timeout=max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            sys.exit(f"{what}: rank {rank} did not end within {seconds} s")
        if process.returncode != 0:
            for other in processes:
                other.kill()
            sys.exit(f"{what}: rank {rank} ended with {process.returncode}:\n{out}")
        print(f"{what}, rank {rank}: ok {out.strip()}")


def cut(cut_rank):
    with tempfile.TemporaryDirectory() as folder:
        mended = os.path.join(folder, "mended")
        ranks = [start(rank, [cut_rank, mended], "proxy", {"BELFRY_BOOTSTRAP_TIMEOUT": "30"})
                 for rank in range(2)]
        try:
            for rank, process in enumerate(ranks):
                line = process.stdout.readline().strip()
                if line != "playing":
                    sys.exit(f"cut: rank {rank} said '{line}{process.stdout.read()}'")
            time.sleep(0.3)
            drop(100)
            begin = time.monotonic()
            for rank, process in enumerate(ranks):
                line = process.stdout.readline().strip()
                after = time.monotonic() - begin
                print(f"cut, rank {rank} after {after:.1f} s: {line}")
                # The wait's own deadline is 4 s; the error must come before.
                if not line.startswith("failed, the other named") or after > 8:
                    sys.exit("cut: not an error that names the other within the deadline")
            drop(0)
            open(mended, "w").close()
            finish("after the cut", ranks, 60)
        finally:
            for process in ranks:
                process.kill()


def main():
    job_rank, cut_rank = sys.argv[1:]
    try:
        join()
        wait_for_links()
        drop(2)
        for path in ("host", "proxy"):
            finish(f"{path} with drops", [start(rank, [job_rank, path, "cooperative"], path)
                                          for rank in range(2)], 100)
        drop(0)
        cut(cut_rank)
    finally:
        for name in NAMES:
            ip("netns", "del", name)


main()
