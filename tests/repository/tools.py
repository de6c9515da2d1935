#!/usr/bin/env python3
"""Runs `dev` as far as it goes without building."""

import os
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


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

    def test_arguments_are_checked_before_anything_is_built(self):
        done = self.run_here("./dev", "bench", "--rounds", "none")
        self.assertEqual(done.returncode, 2)
        self.assertIn("argument --rounds", done.stderr)

    def test_paths_are_relative_to_the_caller(self):
        self.run_here("./dev", "bench", "--pictures", "drawn", "--help")
        self.assertTrue(os.path.isdir(self.path("drawn")))


if __name__ == "__main__":
    unittest.main()
