#!/usr/bin/env python3
"""Two QEMU guests as two hosts, joined by a virtual link, with the kernel's soft-RoCE.

    rxe.py --kernel FOLDER [--build FOLDER] [--folder FOLDER] [--rounds N] [--json FILE]
           [--only suite,disturbed,cut,bars]

suite: the matrix's jobs over verbs and fabric (tcp). disturbed: the same over a link that delays,
drops and reorders. cut: a link that loses everything. bars: belfry bench against perftest, in turn.
"""
import argparse
import glob
import json
import os
import statistics
import sys
import time

from guests import ADDRESSES, Failure, Pair, make_image

PROGRAMS = ("tests/conformance/job_rank", "tests/field/cut_rank", "tools/belfry/belfry")
# One packet of a hundred overtakes those that are on their way.
DISTURBED = "delay 500us reorder 1% loss 0.1%"
# Guests without KVM stop for long whenever others want their cores: 4.096 us * 2^16 = 0.27 s.
PATIENT = {"BELFRY_VERBS_TIMEOUT": 16}
LATENCY_BAR, BANDWIDTH_BAR = 1.3, 0.9


class Ports:
    """One of its own for each job: those of the last may still be in use."""

    def __init__(self):
        self.next = 23000

    def take(self):
        self.next += 1
        return self.next


PORTS = Ports()


def start_ranks(pair, command, variables):
    port = PORTS.take()
    commands = []
    for rank, guest in enumerate(pair.guests):
        environment = {"BELFRY_RANK": rank, "BELFRY_RANKS": 2, "BELFRY_LOCAL_RANK": 0,
                       "BELFRY_LOCAL_RANKS": 1, "BELFRY_ROOT": f"{ADDRESSES[0]}:{port}",
                       "BELFRY_TOKEN": f"guests-{port}", "BELFRY_HOST_ID": guest.name,
                       "BELFRY_BOOTSTRAP_TIMEOUT": 60, **PATIENT, **variables}
        words = " ".join(f"{name}='{value}'" for name, value in environment.items())
        commands.append(guest.start(f"{words} {command}"))
    return commands


def ranks(pair, what, command, variables, seconds):
    """Both ranks' output; they have so long. Guests that go on with a failed job are of no use."""
    begin = time.monotonic()
    outputs = [c.finish(begin + seconds)
               for c in start_ranks(pair, f"timeout {seconds} {command}", variables)]
    print(f"ok  {what}  ({time.monotonic() - begin:.0f} s)", flush=True)
    return outputs


def jobs(pair, link):
    verbs = {"BELFRY_PROVIDER": "verbs"}
    for name, variables in (("verbs", verbs),
                            ("verbs, signals and atomics by the CPUs",
                             {**verbs, "BELFRY_VERBS_ATOMICS": 0}),
                            ("verbs, signals and atomics by the device",
                             {**verbs, "BELFRY_VERBS_SIGNALS": 1}),
                            ("fabric (tcp)", {"BELFRY_PROVIDER": "fabric"})):
        for path in ("host", "proxy"):
            ranks(pair, f"{path} on {name}, {link}", f"job_rank {path} cooperative",
                  {**variables, "BELFRY_PATH": path}, 300)


def suite(pair, _):
    jobs(pair, "a clean link")


def disturbed(pair, _):
    pair.disturb(DISTURBED)
    jobs(pair, DISTURBED)
    for guest in pair.guests:
        print(f"    guest {guest.name}: {counters(guest)}", flush=True)
    pair.disturb("")


def counters(guest):
    """rxe's counters of what was not as it should be, and netem's of what it did."""
    text = guest.run("cd /sys/class/infiniband/rxe0/ports/1/hw_counters; "
                     "for c in completer_retry_err out_of_seq_request duplicate_request "
                     "retry_exceeded_err rcvd_rnr_err; do echo -n \"$c $(cat $c), \"; done; "
                     "/bin/tc -s qdisc show dev eth0 | grep -o 'dropped [0-9]*'")
    return " ".join(text.split())


# --- the bars -----------------------------------------------------------------------------------


def perftest(pair, command):
    """What the client prints; `command` without the port and the server."""
    port = PORTS.take()
    timeout = PATIENT["BELFRY_VERBS_TIMEOUT"]
    command = f"timeout 170 {command} -d rxe0 -x 1 -u {timeout} -F -p {port}"
    server = pair.guests[0].start(command)
    pair.guests[0].run(f"i=0; until grep -qi ':{port:04x} .* 0a ' /proc/net/tcp /proc/net/tcp6; "
                       "do i=$((i + 1)); [ $i -lt 100 ] || exit 1; sleep 0.1; done")
    output = pair.guests[1].run(f"{command} {ADDRESSES[0]}", 180)
    server.finish(time.monotonic() + 30)
    return output


def figures_of(output, size):
    for line in output.splitlines():
        words = line.split()
        if words and words[0] == str(size):
            return words
    raise Failure(f"perftest printed no line for {size} bytes:\n{output}")


def write_latency(pair, iterations):
    # bytes, iterations, least, most, typical, ...
    output = perftest(pair, f"ib_write_lat -s 8 -n {iterations}")
    return float(figures_of(output, 8)[4])


def write_bandwidth(pair, bytes, iterations):
    # bytes, iterations, peak, average, message rate
    output = perftest(pair, f"ib_write_bw -s {bytes} -n {iterations} --report_gbits")
    return float(figures_of(output, bytes)[3]) / 8


def bench(pair, what, size, iterations, variables={}):
    """The median that rank 0 found."""
    command = (f"timeout 170 belfry bench {what} --provider verbs --path proxy --sizes {size} "
               f"--gpu off --iterations {iterations} --json /tmp/{what}.json")
    begin = time.monotonic()
    for rank in start_ranks(pair, command, {"BELFRY_BOOTSTRAP_TIMEOUT": 160, **variables}):
        rank.finish(begin + 180)
    return json.loads(pair.guests[0].run(f"cat /tmp/{what}.json"))["rows"][0]["p50"]


def bars(pair, options):
    rounds = options.rounds
    bytes = 65536  # 64 MiB of them a round
    figures = {"belfry_us": [], "belfry_device_signals_us": [], "ib_write_lat_us": [],
               "belfry_gbs": [], "ib_write_bw_gbs": []}
    for _ in range(rounds):
        figures["belfry_us"].append(bench(pair, "latency", 8, 1000))
        figures["belfry_device_signals_us"].append(
            bench(pair, "latency", 8, 1000, {"BELFRY_VERBS_SIGNALS": 1}))
        figures["ib_write_lat_us"].append(write_latency(pair, 1000))
        figures["belfry_gbs"].append(bench(pair, "bandwidth", bytes, 1))
        figures["ib_write_bw_gbs"].append(write_bandwidth(pair, bytes, 1024))
        print("    " + ", ".join(f"{name} {values[-1]:.4g}" for name, values in figures.items()),
              flush=True)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    latency = medians["belfry_us"] / medians["ib_write_lat_us"]
    bandwidth = medians["belfry_gbs"] / medians["ib_write_bw_gbs"]
    print(f"medians of {rounds} rounds in turn\n"
          "| what | belfry, `proxy` on `verbs` | perftest | ratio | bar |\n|---|---|---|---|---|\n"
          f"| 8 B put + signal, one way, us, against ib_write_lat | {medians['belfry_us']:.1f} "
          f"| {medians['ib_write_lat_us']:.1f} | {latency:.2f} | ≤ {LATENCY_BAR}: "
          f"{'met' if latency <= LATENCY_BAR else 'NOT met'} |\n"
          f"| the same, signals by the device | {medians['belfry_device_signals_us']:.1f} "
          f"| {medians['ib_write_lat_us']:.1f} "
          f"| {medians['belfry_device_signals_us'] / medians['ib_write_lat_us']:.2f} | – |\n"
          f"| 64 KiB puts, GB/s, against ib_write_bw | {medians['belfry_gbs']:.4f} "
          f"| {medians['ib_write_bw_gbs']:.4f} | {bandwidth:.2f} | ≥ {BANDWIDTH_BAR}: "
          f"{'met' if bandwidth >= BANDWIDTH_BAR else 'NOT met'} |", flush=True)
    if options.json:
        with open(options.json, "w") as stream:
            json.dump({"rounds": rounds, "figures": figures, "medians": medians,
                       "latency_ratio": latency, "bandwidth_ratio": bandwidth}, stream, indent=2)


# --- a cut link ---------------------------------------------------------------------------------


def cut(pair, _):
    for provider in ("verbs", "fabric"):
        commands = start_ranks(pair, "timeout 120 cut_rank /tmp/mended",
                               {"BELFRY_PROVIDER": provider, "BELFRY_PATH": "proxy",
                                "BELFRY_VERBS_RETRIES": 4})
        for command in commands:
            line = command.line(time.monotonic() + 60)
            if line != "playing":
                command.finish(time.monotonic() + 60)
                raise Failure(f"cut, {provider}: a rank said '{line}'")
        time.sleep(2)
        pair.disturb("loss 100%")
        begin = time.monotonic()
        for rank, command in enumerate(commands):
            line = command.line(begin + 30)
            after = time.monotonic() - begin
            print(f"    {provider}, rank {rank} after {after:.1f} s: {line}", flush=True)
            # The wait's own deadline is 4 s; the error must come before.
            if line is None or not line.startswith("failed, the other named") or after > 8:
                try:
                    command.finish(time.monotonic() + 10)
                finally:
                    print("\n".join(command.output))
                raise Failure(f"cut, {provider}: not an error that names the other in time")
        pair.disturb("")
        for guest in pair.guests:
            guest.run("touch /tmp/mended")
        for command in commands:
            command.finish(time.monotonic() + 60)
        for guest in pair.guests:
            guest.run("rm /tmp/mended")
        print(f"ok  a cut link and a new start, {provider}", flush=True)


PARTS = {"suite": suite, "disturbed": disturbed, "cut": cut, "bars": bars}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", required=True, help="Debian's kernel package, unpacked")
    parser.add_argument("--build", default="build/release", help="where belfry was built")
    parser.add_argument("--folder", default="build/rxe", help="for the image, sockets and logs")
    parser.add_argument("--rounds", type=int, default=5, help="of the bars")
    parser.add_argument("--only", default="suite,disturbed,cut,bars", help="parts, with commas")
    parser.add_argument("--json", help="write the bars' figures to this file")
    parser.add_argument("--minutes", type=int, default=30, help="after which everything ends")
    parser.add_argument("--accelerator", default="tcg,thread=multi", help="QEMU's -accel")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: there is no part '{unknown.pop()}'; there are {', '.join(PARTS)}")
    kernels = glob.glob(os.path.join(options.kernel, "boot", "vmlinuz-*"))
    if not kernels:
        parser.error(f"--kernel {options.kernel}: no boot/vmlinuz-* is there; unpack Debian's "
                     "linux-image package with dpkg -x")
    os.makedirs(options.folder, exist_ok=True)
    image = os.path.join(options.folder, "image.cpio")
    programs = [os.path.join(options.build, program) for program in PROGRAMS]
    begin = time.monotonic()
    try:
        make_image(options.kernel, programs, image)
        with Pair(kernels[0], image, options.folder, options.minutes * 60,
                  options.accelerator) as pair:
            print(f"two guests are up  ({time.monotonic() - begin:.0f} s)", flush=True)
            for part, function in PARTS.items():
                if part in parts:
                    function(pair, options)
    except Failure as failure:
        sys.exit(f"FAILED  {failure}")
    print(f"ended after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
