#!/usr/bin/env python3
"""What the belfry command answers, as claims: right input works, wrong input is an error that
names the thing, the value and the remedy, with a non-zero exit. Argument: the belfry program."""
import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest

BELFRY = None


def run(*arguments, **environment):
    return subprocess.run([BELFRY, *arguments], env={**os.environ, **environment}, timeout=200,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Command(unittest.TestCase):
    def refused(self, result, *words):
        self.assertNotEqual(result.returncode, 0, result.stdout)
        for word in words:
            self.assertIn(word, result.stdout)

    def worked(self, result):
        self.assertEqual(result.returncode, 0, result.stdout)
        return result.stdout

    def test_every_subcommand_has_help(self):
        for command in (["demo"], ["run"], ["doctor"], ["softnic"], ["softnic", "run"], ["bench"], ["bench", "latency"],
                        ["bench", "bandwidth"], ["bench", "rate"], ["bench", "alltoall"],
                        ["bench", "anatomy"], ["bench", "compare"]):
            out = self.worked(run(*command, "--help"))
            self.assertIn("--help", out)
            if command[0] == "bench" and command[1:] not in ([], ["compare"]):
                for option in ("--path", "--provider", "--ranks", "--sizes", "--contexts",
                               "--iterations", "--json"):
                    self.assertIn(option, out)

    def test_an_unknown_option_is_named(self):
        self.refused(run("bench", "latency", "--pth", "direct"), "--pth")

    def test_an_unknown_path_is_named_with_the_known_ones(self):
        self.refused(run("bench", "latency", "--path", "dirct"), "dirct", "direct", "proxy")
        self.refused(run("run", "-n", "1", "--", BELFRY, "bench", "latency", BELFRY_PATH="x"), "")

    def test_a_size_that_is_none_is_named(self):
        self.refused(run("bench", "latency", "--sizes", "12Q"), "12Q", "64K")
        self.refused(run("bench", "latency", "--sizes", "0"), "0 B")
        self.refused(run("bench", "latency", "--sizes", "7"), "7 B", "multiples of 4")

    def test_latency_is_between_two_ranks(self):
        self.refused(run("bench", "latency", "--ranks", "3"), "--ranks", "3", "alltoall")

    def test_a_provider_that_is_not_here_is_named_with_the_remedy(self):
        self.refused(run("bench", "latency", "--provider", "mlx5", "--path", "direct", "--sizes", "8"),
                     "provider mlx5", "doctor")
        self.refused(run("bench", "latency", "--provider", "nic", "--sizes", "8"), "'nic'", "soft")

    def test_a_program_that_is_not_there_is_named(self):
        self.refused(run("run", "-n", "2", "--", "/nonexistent/program"), "/nonexistent/program")

    def test_the_exit_code_is_that_of_the_rank_that_failed(self):
        result = run("run", "-n", "3", "--", "sh", "-c", "exit $((BELFRY_RANK==1?7:0))")
        self.assertEqual(result.returncode, 7)
        self.assertIn("rank 1", result.stdout)

    def test_a_job_that_takes_too_long_is_ended(self):
        result = run("run", "-n", "2", "--timeout", "0.3", "--", "sleep", "100")
        self.assertEqual(result.returncode, 124)

    def test_a_file_that_cannot_be_written_is_named_before_the_work(self):
        self.refused(run("bench", "latency", "--json", "/nonexistent/x.json"),
                     "/nonexistent/x.json", "No such file")

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_a_full_disk_is_an_error(self):
        self.refused(run("doctor", "--json", "/dev/full"), "/dev/full", "No space left")

    def test_softnic_refuses_what_cannot_be(self):
        self.refused(run("softnic", "run", "--drop", "2", "--", "true"), "--drop", "2")
        self.refused(run("softnic", "run", "--fabric", "a/b", "--", "true"), "a/b")
        self.refused(run("softnic", "run", "--devices", "99", "--", "true"), "--devices", "99")
        self.refused(run("softnic", "run", "--latency", "-5", "--", "true"), "--latency", "-5")
        self.refused(run("softnic", "run", "--rate", "-1", "--", "true"), "--rate", "-1")

    def test_a_wrong_token_and_a_port_in_use_are_named(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            result = run("bench", "latency", "--path", "lsa", "--sizes", "8", BELFRY_RANK="0",
                         BELFRY_RANKS="2", BELFRY_ROOT=f"127.0.0.1:{port}", BELFRY_TOKEN="t",
                         BELFRY_BOOTSTRAP_TIMEOUT="5")
            self.refused(result, str(port))

    def test_doctor_reports_paths_and_providers(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "doctor.json")
            out = self.worked(run("doctor", "--json", file))
            with open(file) as handle:
                report = json.load(handle)
        self.assertEqual({row["path"] for row in report["paths"]},
                         {"host", "triggered", "proxy", "direct", "lsa"})
        for provider in report["providers"]:
            self.assertTrue(provider["works"] or provider["missing"], provider)
        self.assertIn("soft", out)

    def test_doctor_says_what_runs_softnic_on_gpus(self):
        out = self.worked(run("doctor", BELFRY_SOFTNIC_ENGINE="cpu"))
        self.assertIn("copy engines", out)
        out = self.worked(run("doctor", BELFRY_SOFTNIC_ENGINE="kernel"))
        self.assertIn("a kernel that takes 4 SMs", out)
        self.refused(run("doctor", BELFRY_SOFTNIC_ENGINE="gpu"), "BELFRY_SOFTNIC_ENGINE", "'gpu'", "kernel or cpu")

    def test_doctor_looks_at_another_root_and_names_the_remedy_of_what_is_missing_there(self):
        with tempfile.TemporaryDirectory() as root:
            def put(path, text):
                full = os.path.join(root, path)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w") as handle:
                    handle.write(text + "\n")
            put("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
            put("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet")
            put("proc/self/limits", "Max locked memory         65536     65536     bytes")
            file = os.path.join(root, "doctor.json")
            out = self.worked(run("doctor", "--json", file, BELFRY_SYSTEM_ROOT=root))
            with open(file) as handle:
                findings = {row["what"]: row for row in json.load(handle)["findings"]}
        self.assertFalse(findings["mlx5_0 port 1, link"]["good"])
        self.assertIn("DOWN", findings["mlx5_0 port 1, link"]["found"])
        self.assertEqual(findings["locked memory limit"]["found"], "64 KiB")
        for row in findings.values():
            self.assertTrue(row["good"] or row["remedy"], row)
            self.assertIn(row["what"], out)

    def test_latency_measures_every_path_and_writes_json(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "latency.json")
            self.worked(run("bench", "latency", "--sizes", "8,4K", "--iterations", "50",
                            "--json", file))
            with open(file) as handle:
                rows = json.load(handle)["rows"]
        self.assertEqual({(row["path"], row["bytes"]) for row in rows},
                         {(path, size) for path in ("host", "triggered", "proxy", "direct", "lsa")
                          for size in (8, 4096)})
        for row in rows:
            self.assertGreater(row["p50"], 0)
            self.assertGreaterEqual(row["p99"], row["p50"])

    def test_the_other_benchmarks_run(self):
        self.worked(run("bench", "bandwidth", "--sizes", "64K", "--iterations", "2"))
        self.worked(run("bench", "rate", "--iterations", "2", "--contexts", "2"))
        self.worked(run("bench", "alltoall", "--ranks", "3", "--sizes", "4K", "--iterations", "3"))

    def test_anatomy_has_every_stage(self):
        out = self.worked(run("bench", "anatomy", "--iterations", "50"))
        for stage in ("reserve", "build", "fence", "ring", "NIC fetch", "move", "remote visible",
                      "CQE written", "CQE seen"):
            self.assertIn(stage, out)


if __name__ == "__main__":
    BELFRY = sys.argv.pop(1)
    unittest.main()
