#!/usr/bin/env python3
"""clang-tidy over src/ and tools/, remembering what passed.

    run_tidy.py --clang-tidy PROGRAM --build BUILD_DIRECTORY --jobs N --seconds BUDGET

A source (with BELFRY_UNITY, a folder of them) is checked again only when it, a header of this tree that it includes (as ninja noted
when it compiled it), .clang-tidy or clang-tidy itself changed since it last passed. The files
that changed last are checked first; those that the budget does not reach are named, not failed.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import time

FOLDERS = ("src", "tools", "examples")


def includes(build, root):
    """object -> the headers of this tree that went into it, from ninja's deps log."""
    found, current = {}, None
    out = subprocess.run(["ninja", "-C", build, "-t", "deps"], capture_output=True, text=True,
                         check=True).stdout
    for line in out.splitlines():
        if line and not line.startswith((" ", "ninja:")):
            current = found.setdefault(line.split(":")[0], set())
        elif line.startswith("    "):
            path = os.path.normpath(os.path.join(build, line.strip()))
            if path.startswith(root + os.sep) and not path.startswith(build + os.sep):
                current.add(path)
    return found


def sources_of(path):
    """The sources that one compile command compiles: itself, or those that a unity source names."""
    if os.sep + "Unity" + os.sep not in path:
        return [path]
    with open(path, encoding="utf-8") as stream:
        return [os.path.realpath(line.split('"')[1]) for line in stream
                if line.startswith("#include")]


def key(paths, salt):
    digest = hashlib.sha256(salt)
    for path in sorted(paths):
        digest.update(path.encode())
        with open(path, "rb") as stream:
            digest.update(hashlib.sha256(stream.read()).digest())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clang-tidy", required=True)
    parser.add_argument("--build", required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()

    root = os.path.realpath(os.path.join(os.path.dirname(__file__), ".."))
    build = os.path.realpath(arguments.build)
    cache = os.path.join(root, "build", "tidy-cache")
    os.makedirs(cache, exist_ok=True)

    version = subprocess.run([arguments.clang_tidy, "--version"], capture_output=True, check=True)
    with open(os.path.join(root, ".clang-tidy"), "rb") as stream:
        salt = version.stdout + stream.read()

    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as stream:
        commands = json.load(stream)
    headers = includes(build, root)
    work = []
    total = 0
    for command in commands:
        path = os.path.realpath(os.path.join(command["directory"], command["file"]))
        sources = sources_of(path)
        if not os.path.relpath(sources[0], root).startswith(tuple(f + os.sep for f in FOLDERS)):
            continue
        total += 1
        parts = {*sources} | headers.get(command.get("output", ""), set())
        mark = os.path.join(cache, key(parts, salt + command["command"].encode()))
        if not os.path.exists(mark):
            work.append((max(os.path.getmtime(part) for part in parts), path, mark))
    work.sort(reverse=True)

    end = time.monotonic() + arguments.seconds
    failed, skipped = [], []

    def check(item):
        _, path, mark = item
        if time.monotonic() > end:
            return path, None, ""
        done = subprocess.run([arguments.clang_tidy, "--quiet", "-p", build, path],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            open(mark, "w", encoding="utf-8").close()
        # What the compiler itself refused is only on the second stream.
        return path, done.returncode, done.stdout or done.stderr

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for number, (path, code, text) in enumerate(pool.map(check, work), 1):
            name = os.path.relpath(path, root)
            if code is None:
                skipped.append(name)
                continue
            print(f"[{number}/{len(work)}] {name}", flush=True)
            if code:
                failed.append(name)
                print(text, flush=True)
    if skipped:
        print(f"not reached within {arguments.seconds:.0f} s: {' '.join(skipped)}")
    print(f"tidy: {total} sources, {total - len(work)} unchanged since they passed, "
          f"{len(work) - len(skipped) - len(failed)} passed, {len(failed)} failed, "
          f"{len(skipped)} not reached")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
