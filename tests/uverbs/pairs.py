#!/usr/bin/env python3
"""Unmodified programs on rdma-core, as a server and a client that reach each other through SoftNIC.

    pairs.py BELFRY LEAVE_TOGETHER SET      SET: pingpong, perftest, ucx, libfabric, connections, faults, pacing
                                            LEAVE_TOGETHER: the library made of leave_together.cpp

A set whose programs are not installed is skipped (exit code 77), and says which package has them.
"""
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

BELFRY = None
LEAVE_TOGETHER = None
FABRIC = f"test-{os.getpid()}"
PACKAGES = {"ibv_devinfo": "ibverbs-utils", "ib_write_bw": "perftest", "ucx_perftest": "ucx-utils",
            "fi_info": "libfabric-bin", "rping": "rdmacm-utils"}


def need(program):
    if shutil.which(program) is None:
        print(f"skipped: {program} was not found; install {PACKAGES[program]}")
        sys.exit(77)


def start(command, options=(), environment=None, descriptors=()):
    return subprocess.Popen([BELFRY, "softnic", "run", "--fabric", FABRIC, *options, "--", *command],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, pass_fds=descriptors,
                            start_new_session=True, env={**os.environ, **(environment or {})})


def finish(process, seconds):
    """Output and exit code; the whole session is killed when it takes too long."""
    try:
        output, _ = process.communicate(timeout=seconds)
        return output, process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return output + f"\n(killed after {seconds} s)", 124


def run(command, options=(), seconds=30):
    return finish(start(command, options), seconds)


def listening(port):
    """Whether somebody listens on this TCP port, or on that of the connection manager, without connecting to it."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as stream:
                rows = [line.split() for line in stream]
        except OSError:
            continue
        if any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows[1:]):
            return True
    # docs/softnic.md: a listener is a UNIX socket; the flag is that of listen().
    with open("/proc/net/unix") as stream:
        rows = [line.split() for line in stream]
    names = tuple(f"-{FABRIC}-cm-{space}-{port}" for space in ("106", "111"))
    return any(row[-1].endswith(names) and row[3] == "00010000" for row in rows[1:])


def pair(server, client, port, options=(), environment=None, seconds=60, together=False):
    """Both outputs and exit codes. The client starts when the server listens. `together`: neither destroys its
    queue before both have come to their end; leave_together.cpp says whom that helps."""
    ends = socket.socketpair() if together else ()
    sides = [(environment, ())] * 2
    if together:
        sides = [({**(environment or {}), "LD_PRELOAD": LEAVE_TOGETHER, "BELFRY_TEST_PEER_SOCKET": str(end.fileno())},
                  (end.fileno(),)) for end in ends]
    first = start(server, options, *sides[0])
    deadline = time.monotonic() + 20
    while not listening(port) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    second = start(client, options, *sides[1])
    for end in ends:
        end.close()
    client_output, client_code = finish(second, seconds)
    if client_code != 0 and first.poll() is None:
        os.killpg(first.pid, signal.SIGKILL)
    server_output, server_code = finish(first, 20)
    return client_output, client_code, server_output, server_code


def verdict(passed, name, details):
    """Prints whether a case passed, and if not what there was to see."""
    print(f"{'ok' if passed else 'FAILED'}  {name}")
    if not passed:
        print(details)
    return passed


def both_succeed(name, server, client, port, options=(), environment=None, together=False):
    begin = time.monotonic()
    result = pair(server, client, port, options, environment, together=together)
    good = result[1] == 0 and result[3] == 0
    return verdict(good, f"{name}  ({time.monotonic() - begin:.1f} s)",
                   f"client, exit {result[1]}:\n{result[0]}\nserver, exit {result[3]}:\n{result[2]}")


class Ports:
    """A port of its own for each pair: a server of the last one may still hold its own."""

    def __init__(self):
        self.next = 20000 + os.getpid() % 20000

    def take(self):
        self.next += 1
        return self.next


PORTS = Ports()


def pingpong():
    need("ibv_devinfo")
    output, code = run(["ibv_devinfo", "-v"])
    good = code == 0 and "mlx5_0" in output and "PORT_ACTIVE" in output and "RoCE v2" in output
    verdict(good, "ibv_devinfo -v", output)
    for words in ("ibv_rc_pingpong", "ibv_rc_pingpong -e", "ibv_rc_pingpong -s 262144 -n 100",
                  "ibv_ud_pingpong", "ibv_ud_pingpong -e", "ibv_srq_pingpong -q 4",
                  "ibv_srq_pingpong -q 4 -e"):
        port = PORTS.take()
        command = words.split() + ["-g", "1", "-p", str(port)]
        if "-n" not in command:
            command += ["-n", "200"]
        good &= both_succeed(words, command, command + ["localhost"], port)
    port = PORTS.take()
    command = ["ibv_rc_pingpong", "-n", "200", "-p", str(port)]
    good &= both_succeed("ibv_rc_pingpong on InfiniBand", command, command + ["localhost"], port,
                         ["--link", "infiniband"])
    return good


def perftest():
    need("ib_write_bw")
    good = True
    for words in ("ib_write_lat -s 8 -n 500", "ib_write_lat -s 64 -I 64 -n 200",
                  "ib_write_bw -a -n 5", "ib_write_bw -q 4 -l 16 -n 320", "ib_write_bw -b -n 200",
                  "ib_read_lat -n 200", "ib_read_bw -a -n 5", "ib_read_lat -e -n 50",
                  "ib_send_lat -n 200", "ib_send_lat -e -n 50", "ib_send_bw -s 65536 -q 2 -l 4 -n 200",
                  "ib_send_bw -r 64 --use-srq -q 4 -n 100", "ib_send_lat -c UD -n 200",
                  "ib_atomic_lat -A FETCH_AND_ADD -n 200", "ib_atomic_lat -A CMP_AND_SWAP -e -n 50",
                  "ib_atomic_bw -n 200"):
        port = PORTS.take()
        command = words.split() + ["-p", str(port)]
        good &= both_succeed(words, command, command + ["localhost"], port)
    # Memory that stays as it is, which peers reach by system calls.
    for words in ("ib_write_bw -a -n 5", "ib_read_lat -n 50", "ib_atomic_lat -A FETCH_AND_ADD -n 50"):
        port = PORTS.take()
        command = words.split() + ["-p", str(port)]
        good &= both_succeed(f"{words}, not shared", command, command + ["localhost"], port, ["--no-share"])
    return good


def ucx():
    need("ucx_perftest")
    good = True
    tests = ("tag_lat -n 50 -s 8", "tag_bw -n 20 -s 65536", "ucp_get -n 20 -s 4096",
             "ucp_put_lat -n 20 -s 8", "ucp_put_bw -n 20 -s 4096", "ucp_fadd -n 20 -s 8")
    for transports in ("rc_verbs,ud_verbs", "rc_mlx5,ud_mlx5"):
        environment = {"UCX_TLS": transports + ",self", "UCX_NET_DEVICES": "mlx5_0:1"}
        for words in tests:
            port = PORTS.take()
            good &= both_succeed(
                f"ucx_perftest {words} over {transports}", ["ucx_perftest", "-p", str(port)],
                ["ucx_perftest", "localhost", "-p", str(port), "-w", "5", "-t", *words.split()],
                port, environment=environment)
        # Below UCP: one transport, chosen by name.
        transport = transports.split(",")[0]
        port = PORTS.take()
        good &= both_succeed(
            f"ucx_perftest put_lat over {transport}", ["ucx_perftest", "-p", str(port)],
            ["ucx_perftest", "localhost", "-p", str(port), "-w", "5", "-t", "put_lat", "-n", "20",
             "-s", "8", "-d", "mlx5_0:1", "-x", transport], port, environment=environment)
    return good


def libfabric():
    need("fi_info")
    output, code = run(["fi_info", "-p", "verbs"])
    good = code == 0 and "mlx5_0" in output and "FI_PROTO_RDMA_CM_IB_RC" in output
    return verdict(good, "fi_info -p verbs", output)


def connections():
    """Programs whose connections librdmacm makes."""
    need("rping")
    need("ib_write_bw")
    need("fi_info")
    good = True
    where = ["-a", "127.0.0.1"]
    port = PORTS.take()
    command = ["rping", "-V", "-C", "20", "-S", "1000", "-p", str(port)] + where
    good &= both_succeed("rping", command + ["-s"], command + ["-c"], port)
    port = PORTS.take()
    command = ["rping", "-V", "-C", "5", "-p", str(port), "-a", "::1"]
    good &= both_succeed("rping on InfiniBand, IPv6", command + ["-s"], command + ["-c"], port,
                         ["--link", "infiniband"])
    port = PORTS.take()
    good &= both_succeed("ucmatose", ["ucmatose", "-p", str(port)],
                         ["ucmatose", "-p", str(port), "-s", "127.0.0.1"], port)
    good &= both_succeed("rdma_server and rdma_client", ["rdma_server", "-p", str(port)],
                         ["rdma_client", "-p", str(port), "-s", "127.0.0.1"], port)
    good &= both_succeed("udaddy", ["udaddy"], ["udaddy", "-s", "127.0.0.1"], 7174)
    for words in ("ib_write_lat -R -s 8 -n 200", "ib_write_bw -R -q 4 -n 320", "ib_send_lat -R -n 100"):
        port = PORTS.take()
        command = words.split() + ["-p", str(port)]
        good &= both_succeed(words, command, command + ["localhost"], port)
    for kind, provider in (("msg", "verbs"), ("rdm", "verbs;ofi_rxm")):
        port = PORTS.take()
        command = ["fi_pingpong", "-p", provider, "-e", kind, "-I", "50", "-S", "4096"]
        good &= both_succeed(f"fi_pingpong -p '{provider}' -e {kind}", command + ["-B", str(port)],
                             command + ["-P", str(port), "localhost"], port, together=kind == "rdm")
    port = PORTS.take()
    output, code = run(["rping", "-c", "-C", "1", "-p", str(port)] + where)
    passed = code not in (0, 124) and "RDMA_CM_EVENT_REJECTED" in output
    good &= verdict(passed, "nobody listens: the connection is rejected", f"exit {code}:\n{output}")
    return good & killed_server()


def killed_server():
    """The client of a server that is killed learns of it, by its connection or by its queue, and ends."""
    port = PORTS.take()
    command = ["rping", "-v", "-C", "1000000000", "-p", str(port), "-a", "127.0.0.1"]
    server = start(command + ["-s"])
    deadline = time.monotonic() + 20
    while not listening(port) and server.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    client = start(command + ["-c"])
    first = client.stdout.readline()  # a ping came back
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    output, code = finish(client, 30)
    # Whichever comes first: the event, or what was under way to the server and was lost (12).
    learned = "DISCONNECT" in output or "completion failed status 12" in output
    passed = "ping data" in first and code != 124 and learned
    return verdict(passed, "a server is killed: its client learns of it",
                   f"exit {code}:\n{first}{output[-2000:]}")


def faults():
    """What a cable that is cut, and a WQE that fails, look like to a program."""
    need("ib_write_bw")
    good = True
    for name, options, status in (("a link that is cut", ["--drop", "1"], "Failed status 12"),
                                  ("an error at the third WQE", ["--error-at", "3"],
                                   "Failed status 11")):
        port = PORTS.take()
        command = ["ib_write_bw", "-n", "50", "-p", str(port)]
        output, code, _, _ = pair(command, command + ["localhost"], port, options)
        passed = code not in (0, 124) and status in output
        good &= verdict(passed, f"{name} is '{status}'", f"exit {code}:\n{output}")
    return good


def pacing():
    """A network that is stood in for is as slow as was asked, and no faster with many messages under way."""
    need("ib_write_lat")
    good = True
    # What is measured, the figure's column in perftest's last row, and its bound from below or above.
    for words, options, column, fits, bound in (
            ("ib_write_lat -s 8 -n 50", ["--latency", "200000"], 4, lambda us: us >= 200, ">= 200 us"),
            ("ib_read_lat -s 8 -n 50", ["--latency", "200000"], 4, lambda us: us >= 400, ">= 400 us"),
            ("ib_write_bw -s 65536 -n 200", ["--rate", "0.8", "--latency", "2000000"], 3,
             lambda mib: 25 < mib <= 95.4, "> 25 MiB/s, which one message at a time cannot reach, and <= 95.4")):
        port = PORTS.take()
        command = words.split() + ["-p", str(port)]
        output, code, _, _ = pair(command, command + ["localhost"], port, options)
        rows = [line.split() for line in output.splitlines() if line.split() and line.split()[0].isdigit()]
        passed = code == 0 and bool(rows) and fits(float(rows[-1][column]))
        good &= verdict(passed, f"{words} with {' '.join(options)}: {bound}", f"exit {code}:\n{output}")
    return good


def main():
    global BELFRY, LEAVE_TOGETHER
    sets = {f.__name__: f for f in (pingpong, perftest, ucx, libfabric, connections, faults, pacing)}
    if len(sys.argv) != 4 or sys.argv[3] not in sets:
        sys.exit(__doc__)
    BELFRY, LEAVE_TOGETHER = sys.argv[1:3]
    try:
        good = sets[sys.argv[3]]()
    finally:
        try:
            os.unlink(f"/dev/shm/belfry-softnic-{os.getuid()}-{FABRIC}")
        except FileNotFoundError:
            pass
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
