#!/usr/bin/env python3
"""`belfry bench compare` against made-up programs in the places of ours and of the peers': that
they run in turn, that medians and ratios are right, and that one which fails, hangs or writes
rubbish is named and does not take the others' figures with it. Argument: the belfry program."""
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest

BELFRY = None

# Writes what it is told to by files of its folder: NAME.json, or NAME.N.json for its Nth run, with
# NAME.sh run before. Ours are named by what they measure.
PROGRAM = """#!/bin/sh
folder=$(dirname "$0")
name=$(basename "$0")
json=
for word; do
  [ "$previous" = --json ] && json=$word
  previous=$word
done
if [ "$name" = belfry ]; then
  name=$2
  case " $* " in *" direct on"*) name=nic_16 ;; *" direct"*) name=nic ;; esac
fi
echo "$name${BELFRY_RANK:+ as a rank}" >>"$folder/order"
echo "$*" >>"$folder/$name.arguments"
runs=$(wc -l <"$folder/$name.arguments")
[ -e "$folder/$name.sh" ] && . "$folder/$name.sh"
if [ -e "$folder/$name.$runs.json" ]; then cp "$folder/$name.$runs.json" "$json"; exit; fi
[ -e "$folder/$name.json" ] && cp "$folder/$name.json" "$json"
exit 0
"""


def ours(benchmark, rows, unit="us", gpus=2):
    return {"benchmark": benchmark, "unit": unit, "gpu": f"{gpus} x made-up GPU", "gpus": gpus,
            "rows": [{"path": path, "bytes": size, "p50": p50, "p99": 2 * p50}
                     for path, size, p50 in rows]}


def theirs(peer, rows):
    return {"peer": peer, "version": "1.2.3", "unit": "us",
            "rows": [{"what": what, "bytes": size, "p50": p50, "p99": 2 * p50, "variant": variant,
                      **({"unit": unit} if unit else {})}
                     for what, size, p50, variant, unit in rows]}


class Compare(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = self.temporary.name
        for name in ("belfry", "nvshmem_peer", "nccl_peer"):
            self.write(name, PROGRAM)
            os.chmod(self.path(name), 0o755)
        self.figures("latency", ours("latency", [("lsa", 8, 2.0), ("packets", 8, 0.8),
                                                 ("packets", 4096, 1.5)]))
        self.figures("bandwidth", ours("bandwidth", [("lsa", 1 << 20, 300.0),
                                                     ("lsa", 16 << 20, 380.0)], "GB/s"))
        self.figures("nic", ours("latency", [("direct", 4, 2.5), ("direct", 8, 2.5),
                                             ("direct", 1 << 20, 40.0)]))
        self.figures("nic_16", ours("latency", [("direct on 16 SMs", 1 << 20, 20.0)]))
        self.figures("rate", ours("rate", [("ring, 1 thread", 64, 3.0), ("ring, 1 warp", 64, 40.0),
                                           ("direct, 1 queue x 1 lane", 8, 0.5),
                                           ("direct, 1 queue x 32 lanes", 8, 5.0)], "M/s"))
        self.figures("nvshmem_peer", theirs("nvshmem", [
            ("put_signal", 8, 2.5, "thread", None), ("put_signal", 8, 2.0, "warp", None),
            ("put_signal", 4096, 2.5, "warp", None),
            ("put_bandwidth", 1 << 20, 310.0, "4 blocks", "GB/s"),
            ("put_bandwidth", 64 << 20, 361.0, "64 blocks", "GB/s")]))
        self.figures("nccl_peer", theirs("nccl", [
            ("send_recv", 4, 23.0, "launch to sync", None),
            ("send_recv", 4, 9.0, "ping-pong in graph", None),
            ("send_recv", 1 << 20, 36.0, "ping-pong in graph", None),
            ("send_recv", 1 << 20, 38.0, "ping-pong in stream", None),
            ("all_reduce", 8, 11.0, "in graph", None)]))

    def tearDown(self):
        self.temporary.cleanup()

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w") as handle:
            handle.write(text)

    def read(self, name):
        with open(self.path(name)) as handle:
            return handle.read()

    def figures(self, name, report):
        self.write(f"{name}.json", json.dumps(report))

    def compare(self, *arguments, code=0, rounds=1):
        result = subprocess.run(
            [BELFRY, "bench", "compare", "--belfry", self.path("belfry"), "--nvshmem",
             self.path("nvshmem_peer"), "--nccl", self.path("nccl_peer"), "--rounds", str(rounds),
             "--json", self.path("result"), *arguments],
            # A seat that is not for the programs.
            env={**os.environ, "BELFRY_RANK": "0", "BELFRY_RANKS": "1"},
            timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(result.returncode, code, result.stdout)
        if os.path.exists(self.path("result")):
            with open(self.path("result")) as handle:
                self.report = json.load(handle)
        return result.stdout

    def row(self, what, size, against=None):
        rows = [row for row in self.report["rows"]
                if row["what"] == what and row["bytes"] == size and row.get("against") == against]
        self.assertEqual(len(rows), 1, (what, size, against))
        return rows[0]

    def test_every_round_runs_every_program_in_turn_and_without_a_seat(self):
        self.compare(rounds=3)
        turn = ["latency", "nvshmem_peer", "bandwidth", "nic", "nic_16", "nccl_peer", "rate"]
        self.assertEqual(self.read("order").split("\n")[:-1], 3 * turn)

    def test_programs_are_told_what_to_measure(self):
        self.compare("--iterations", "77")
        for name in ("latency", "nic", "nic_16", "nvshmem_peer", "nccl_peer"):
            self.assertIn("--iterations 77", self.read(f"{name}.arguments"))
        self.assertIn("bench latency --path lsa,packets --sizes 8,64,512,1K,4K,16K --gpu on",
                      self.read("latency.arguments"))
        self.assertNotIn("--iterations", self.read("bandwidth.arguments"))
        self.assertIn("--sizes", self.read("nccl_peer.arguments"))

    def test_ratios_are_of_the_best_variants_and_judged_by_their_bars(self):
        out = self.compare()
        row = self.row("latency lsa", 8, "nvshmem put_signal")
        self.assertEqual((row["ratio"], row["met"]), (1.0, True))
        self.assertEqual(row["theirs"]["variant"], "warp")
        row = self.row("latency packets", 8, "nvshmem put_signal")
        self.assertAlmostEqual(row["ratio"], 0.4)
        row = self.row("latency packets", 4096, "nvshmem put_signal")
        self.assertEqual((row["ratio"], row["met"]), (0.6, False))
        # The best of ours to the best of theirs, whatever their sizes.
        row = self.row("bandwidth lsa", 0, "nvshmem put_bandwidth")
        self.assertAlmostEqual(row["ratio"], 380 / 361)
        self.assertTrue(row["met"])
        # A variant that is named is compared, though another one is better.
        for variant, ratio, met in (("launch to sync", 23 / 2.5, True),
                                    ("ping-pong in graph", 9 / 2.5, False)):
            row = self.row("latency direct", 4, f"nccl send_recv, {variant}")
            self.assertEqual((row["ratio"], row["met"]), (ratio, met))
        self.assertNotIn("ratio", self.row("latency direct", 4,
                                           "nccl send_recv, ping-pong in stream"))
        row = self.row("latency direct", 1 << 20, "nccl send_recv, ping-pong in stream")
        self.assertEqual((row["ratio"], row["met"]), (38 / 40, False))
        row = self.row("latency direct on 16 SMs", 1 << 20, "nccl send_recv, ping-pong in graph")
        self.assertEqual((row["ratio"], row["met"]), (36 / 20, True))
        row = self.row("latency direct", 8)
        self.assertEqual((row["ours"]["p50"], row["met"]), (2.5, False))
        self.assertTrue(self.row("rate ring, 1 thread", 64)["met"])
        self.assertFalse(self.row("rate ring, 1 warp", 64)["met"])
        row = self.row("rate direct, 1 queue x 32 lanes", 8, "belfry rate direct, 1 queue x 1 lane")
        self.assertEqual((row["ratio"], row["met"]), (10, True))
        for text in ("0.60 x, bar at most 0.55: NOT met", "1.00 x, bar at most 1: met",
                     "3.60 x faster, bar at least 4: NOT met", "nvshmem 1.2.3", "nccl 1.2.3",
                     "2 x made-up GPU"):
            self.assertIn(text, out)
        self.assertEqual(self.report["peers"], {"nvshmem": "1.2.3", "nccl": "1.2.3"})

    def test_what_was_not_measured_is_said_and_not_judged(self):
        out = self.compare()
        row = self.row("latency direct", 4, "belfry latency host")
        self.assertNotIn("ratio", row)
        self.assertNotIn("met", row)
        self.assertIn("not measured", out)

    def test_what_has_no_counterpart_is_listed(self):
        out = self.compare()
        self.assertIn("nccl all_reduce", out)
        self.assertIn(("nccl all_reduce", 8), [(r["what"], r["bytes"]) for r in self.report["others"]])

    def test_figures_are_medians_over_the_rounds(self):
        for run, p50 in enumerate((9.0, 1.0, 3.0), 1):
            self.figures(f"latency.{run}", ours("latency", [("lsa", 8, p50)]))
        self.compare(rounds=3)
        row = self.row("latency lsa", 8, "nvshmem put_signal")
        self.assertEqual((row["ours"]["p50"], row["ours"]["p99"]), (3.0, 6.0))
        self.assertEqual(row["ours"]["rounds"], [9.0, 1.0, 3.0])
        self.assertEqual(row["ratio"], 1.5)

    def test_a_program_that_fails_is_named_with_its_last_words_and_left_out(self):
        self.write("nvshmem_peer.sh", 'if [ "$runs" = 2 ]; then echo "error: the link fell"; exit 3; fi')
        out = self.compare(rounds=4, code=1)
        self.assertIn("nvshmem failed in round 2", out)
        self.assertIn("exit code 3", out)
        self.assertIn("error: the link fell", out)
        self.assertEqual(self.read("order").count("nvshmem_peer"), 2)
        self.assertEqual(self.read("order").count("nccl_peer"), 4)
        self.assertEqual(len(self.row("latency lsa", 8, "nvshmem put_signal")["ours"]["rounds"]), 4)
        self.assertIn("nvshmem", self.report["failures"])

    def test_ours_may_fail_too(self):
        self.write("nic.sh", "echo no NIC; exit 7")
        out = self.compare(code=1)
        self.assertIn("belfry, NIC failed in round 1", out)
        self.assertTrue(self.row("latency lsa", 8, "nvshmem put_signal")["met"])
        self.assertNotIn("ours", self.row("latency direct", 8))

    def test_a_program_that_hangs_is_ended_with_all_that_it_started(self):
        self.write("nccl_peer.sh", f'echo waiting; sleep 300 & echo $! >"{self.path("child")}"; sleep 300')
        started = time.monotonic()
        out = self.compare("--deadline", "1", rounds=2, code=1)
        self.assertLess(time.monotonic() - started, 30)
        self.assertIn("nccl failed in round 1", out)
        self.assertIn("no end within 1 s", out)
        self.assertIn("| waiting", out)
        self.assertEqual(self.read("order").count("rate"), 2)
        self.assertFalse(os.path.exists(f"/proc/{self.read('child').strip()}/cwd"))

    def test_rubbish_is_refused(self):
        for rubbish, words in (("no figures here", "no JSON"), ("[1, 2]", "no rows"),
                               ('{"rows": []}', "no figure"),
                               ('{"rows": [{"what": "put_signal", "bytes": 8}]}', "p50"),
                               ('{"rows": [{"what": "put_signal", "bytes": -8}]}', "bytes"),
                               ('{"rows": [{"what": 3, "bytes": 8}]}', "what"),
                               ('{"version": 3, "rows": [{"what": "put_signal", "bytes": 8, '
                                '"p50": 1, "p99": 1}]}', "JSON"),
                               ('{"rows": [{"what": "put_signal", "bytes": 8, "p50": 0, "p99": 1}]}',
                                "'p50' 0")):
            self.write("nvshmem_peer.json", rubbish)
            out = self.compare(code=1)
            self.assertIn("nvshmem failed in round 1", out)
            self.assertIn(words, out)
        os.unlink(self.path("nvshmem_peer.json"))
        self.assertIn("no JSON file", self.compare(code=1))

    def test_with_one_gpu_the_peers_are_left_out_and_that_is_said(self):
        self.figures("latency", ours("latency", [("lsa", 8, 2.0)], gpus=1))
        out = self.compare(rounds=2)
        self.assertIn("nvshmem left out: there is 1 GPU", out)
        self.assertNotIn("peer", self.read("order"))
        self.assertEqual(self.row("latency lsa", 8, "nvshmem put_signal")["ours"]["p50"], 2.0)

    def test_a_peer_that_is_not_there_is_named_with_the_remedy(self):
        os.unlink(self.path("nccl_peer"))
        out = self.compare(code=1)
        for word in (self.path("nccl_peer"), "BELFRY_PEERS=ON", "--peers"):
            self.assertIn(word, out)
        self.assertFalse(os.path.exists(self.path("order")))
        self.compare("--peers", "nvshmem")
        self.assertNotIn("nccl_peer", self.read("order"))

    def test_an_unknown_peer_is_named_with_the_known_ones(self):
        out = self.compare("--peers", "mpi", code=1)
        for word in ("mpi", "nvshmem", "nccl"):
            self.assertIn(word, out)


if __name__ == "__main__":
    BELFRY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
