#!/usr/bin/env python3
"""Runs `dev` as far as it goes without building, and bench/run over programs that measure nothing."""

import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ROW = {
    "op": "forward", "layout": "NCHW", "type": "float", "shape": [1, 2, 3], "comm": "self", "ranks": 1, "threads": 1,
    "seconds": 1, "floor_bytes": 1, "peers": {}, "allocations": 0, "backend_allocations": 0, "peak_bytes": 0,
}
WRITES = """while [ "$1" != --json ]; do shift; done\necho '{}' > "$2"\n"""


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        os.mkdir(self.path("tmp"))
        self.environment = {**os.environ, "TMPDIR": self.path("tmp"), "SYNCNORM_INSTALL": "0"}

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_here(self, *command):
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60)


class Dev(Case):
    """By a link, in a folder that is not the repository."""

    def setUp(self):
        super().setUp()
        os.symlink(os.path.join(ROOT, "dev"), self.path("dev"))

    def test_help_comes_once_and_builds_nothing(self):
        for task in ("bench", "demo"):
            done = self.run_here("./dev", task, "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout.count(f"usage: ./dev {task}"), 1)
            self.assertEqual(sorted(os.listdir(self.folder)), ["dev", "tmp"])

    def test_help_of_a_task_that_has_none_of_its_own_lists_the_tasks(self):
        for task in ("format", "configure", "lint", "test"):
            done = self.run_here("./dev", task, "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(done.stdout.startswith("usage: ./dev TASK"), done.stdout)

    def test_arguments_are_checked_before_anything_is_built(self):
        done = self.run_here("./dev", "bench", "--rounds", "none")
        self.assertEqual(done.returncode, 2)
        self.assertIn("argument --rounds", done.stderr)

    def test_arguments_that_a_task_does_not_take_are_refused(self):
        for task, arguments in (("lint", ["all"]), ("format", ["--all"]), ("configure", ["debug", "release"])):
            done = self.run_here("./dev", task, *arguments)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"{task} takes", done.stderr)
            self.assertIn(" ".join(arguments), done.stderr)

    def test_what_is_no_option_of_ctest_is_refused(self):
        done = self.run_here("./dev", "test", "extra")
        self.assertEqual(done.returncode, 1)
        self.assertIn("test takes options of ctest, not: extra", done.stderr)

    def test_a_number_of_jobs_is_one(self):
        for jobs in ("0", "-1", "two"):
            self.environment["SYNCNORM_JOBS"] = jobs
            done = self.run_here("./dev", "configure", "no_such_preset")
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"SYNCNORM_JOBS is a number from 1, not: {jobs}", done.stderr)

    def test_paths_are_relative_to_the_caller(self):
        self.run_here("./dev", "bench", "--pictures", "drawn", "--help")
        self.assertTrue(os.path.isdir(self.path("drawn")))


class BenchRun(Case):
    def program(self, name, text):
        with open(self.path(name), "w") as file:
            file.write("#!/bin/sh\n" + text)
        os.chmod(self.path(name), 0o755)

    def rows(self):
        with open(self.path("rows.json")) as file:
            return json.load(file)

    def run_bench(self, *options):
        return self.run_here(os.path.join(ROOT, "bench/run"), "--build", ".", "--json", "rows.json", *options)

    def test_rows_are_written(self):
        self.program("bench.ops", WRITES.format(json.dumps([ROW])))
        done = self.run_bench()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.rows(), [ROW])

    def test_no_row_is_an_error(self):
        self.program("bench.ops", WRITES.format("[]"))
        done = self.run_bench("--filter", "nothing")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no row matches --filter nothing", done.stderr)
        self.assertEqual(self.rows(), [])

    def test_no_row_replaces_none(self):
        self.program("bench.ops", WRITES.format("[]"))
        with open(self.path("rows.json"), "w") as file:
            json.dump([ROW], file)
        self.assertEqual(self.run_bench("--filter", "nothing").returncode, 1)
        self.assertEqual(self.rows(), [ROW])

    @unittest.skipUnless(shutil.which("gnuplot"), "there is no gnuplot")
    def test_rows_of_one_direction_are_drawn(self):
        self.program("bench.ops", WRITES.format(json.dumps([{**ROW, "op": "forward", "comm": "self"}])))
        done = self.run_bench("--pictures", ".")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("share_of_floor.svg")) as file:
            self.assertIn("</svg>", file.read())

    def test_a_signal_leaves_the_rows_so_far_and_nothing_else(self):
        waits = "echo $$ > started.new; mv started.new started; exec sleep 60\n"
        writes = WRITES.format(json.dumps([ROW]))
        for number, of_the_same in ((signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGINT, True)):
            self.program("bench.ops", writes + (waits if of_the_same else ""))
            self.program("bench.host", waits)
            bench = subprocess.Popen([os.path.join(ROOT, "bench/run"), "--build", ".", "--json", "rows.json"],
                                     cwd=self.folder, env=self.environment, stderr=subprocess.DEVNULL,
                                     preexec_fn=functools.partial(signal.signal, number, signal.SIG_DFL))
            while not os.path.exists(self.path("started")):
                self.assertIsNone(bench.poll())
                time.sleep(0.01)
            with open(self.path("started")) as file:
                sleeping = int(file.read())
            bench.send_signal(number)
            self.assertEqual(bench.wait(30), 128 + number)
            self.assertEqual(self.rows(), [ROW])
            self.assertEqual(os.listdir(self.path("tmp")), [])
            self.assertRaises(ProcessLookupError, os.kill, sleeping, 0)
            os.remove(self.path("started"))
            os.remove(self.path("rows.json"))

    def test_nohup_lets_it_go_on(self):
        self.program("bench.ops", "kill -HUP $PPID\n" + WRITES.format(json.dumps([ROW])))
        done = self.run_here("nohup", os.path.join(ROOT, "bench/run"), "--build", ".", "--json", "rows.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.rows(), [ROW])


if __name__ == "__main__":
    unittest.main()
