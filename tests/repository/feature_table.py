#!/usr/bin/env python3
"""Checks that the tests that README.md's table of peers names have the cases that it names, and as many.
usage: feature_table.py README BUILD CTEST"""

import json
import re
import subprocess
import sys

COUNTS = {word: i for i, word in enumerate("one two three four five six seven eight nine ten".split(), 1)}


def named(readme):
    """(test, beginning of a case's name, number of such cases); no beginning where the test alone is named."""
    table = readme.split("## Beside its peers\n")[1].split("\n## ")[0]
    for row in re.findall(r"^\|.*\| (.*) \|$", table, re.MULTILINE):
        for test, _, beginnings in re.findall(r"`([a-z0-9_]+\.[a-z0-9_]+)`(: ([^`]*))?", row):
            if not beginnings:
                yield test, "", 0
            for beginning in filter(None, beginnings.split("; ")):
                # What follows the first colon may be a list, for CUDA tensors.
                kind, colon, rest = beginning.partition("CUDA tensors: ")
                for each in rest.split(", ") if colon else [beginning]:
                    counted = re.fullmatch(r"(.*) \((\w+) cases\)", each)
                    text, count = (counted[1], COUNTS[counted[2]]) if counted else (each, 1)
                    yield test, kind + colon + text if colon else text, count


def cases(command):
    listed = subprocess.run([*command, "--list-test-cases", "--no-colors"], capture_output=True, text=True, check=True)
    return {re.sub(r"<.*>$", "", line) for line in listed.stdout.splitlines()}


def main(readme, build, ctest):
    shown = subprocess.run([ctest, "--show-only=json-v1"], cwd=build, capture_output=True, text=True, check=True)
    commands = {test["name"]: test.get("command") for test in json.loads(shown.stdout)["tests"]}
    found, wrong, absent = {}, [], set()
    for test, beginning, count in named(open(readme, encoding="utf-8").read()):
        if not commands.get(test):
            absent.add(test)
        elif beginning:
            if test not in found:
                found[test] = cases(commands[test])
            matching = sorted(case for case in found[test] if case.startswith(beginning))
            kind = "CUDA tensors: " # of which there are none without CUDA and NCCL, nor by a libtorch that has CUDA itself
            if beginning.startswith(kind) and not any(case.startswith(kind) for case in found[test]):
                absent.add(f"{test}: {kind[:-2]}")
            elif len(matching) != count:
                wrong.append(f"{test}: {beginning}: {count} in the table, {len(matching)} in the test: {matching}")
    print("\n".join([*wrong, *(f"{test}: not here" for test in sorted(absent))]))
    return 1 if wrong or not found else 77 if absent else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
