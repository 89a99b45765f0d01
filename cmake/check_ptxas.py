#!/usr/bin/env python3
"""Runs a nvcc command and fails when ptxas says that the code is not what was meant.

    check_ptxas.py -- nvcc -c kernel.cu -Xptxas=-v,-warn-spills,-warn-lmem-usage ...
    check_ptxas.py --table BUILD_DIRECTORY
    check_ptxas.py --self-test

Fails, after nvcc itself succeeded, when
  - setmaxnreg was ignored (in any kernel: the register split it asked for does not happen), or
  - a kernel, or a function that it calls, spills registers, or
  - a kernel whose own name begins with `hot_` uses local memory, or its wgmma instructions were
    serialised.
Code that is compiled fast (--Ofast-compile, -Xptxas=-O1) may spill, but for hot_ kernels. Prints one
line a kernel: registers, shared memory, stack, spills with those of the functions that it calls.
Other ptxas messages pass.
The same figures go to OBJECT.json, from which --table makes a Markdown table of all kernels.
"""
import json
import pathlib
import re
import subprocess
import sys

# The length before the name is part of the mangled form: hot_put is 7hot_put.
HOT = re.compile(r"(?:^|\d)hot_\w")
FUNCTION = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
FAST = re.compile(r"--Ofast-compile|-Xptxas=-O[01]\b")
STACK = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
                   r"(?P<loads>\d+) bytes spill loads")
USED = re.compile(r"Used (?P<registers>\d+) registers")
SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")
IGNORED = re.compile(r"setmaxnreg.*ignored|ignored.*setmaxnreg", re.I)
SERIALISED = re.compile(r"wgmma.*serialized", re.I)
IN_FUNCTION = re.compile(r"(?:in|of) (?:the )?function '?(?P<name>[\w$]+)'?")
CHATTER = re.compile(r"^ptxas info\s*:|^\s+\d+ bytes stack frame|Function properties for"
                     r"|^ptxas warning : (Registers are spilled|Local memory used)")


def readable(names):
    """Mangled names as a reader knows them, where c++filt is there."""
    try:
        out = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout
        return dict(zip(names, out.splitlines()))
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}


def examine(text, fast=False):
    """What ptxas said: a dict of (kernel, architecture), the faults found, and the lines that are neither."""
    kernels, faults, rest, current = {}, [], [], None
    spilling = {}  # for each of them, the functions that spill
    function = None
    for line in text.splitlines():
        if match := FUNCTION.search(line):
            entry = (match["name"], match["arch"])
            current = kernels.setdefault(entry, {
                "registers": 0, "shared": 0, "stack": 0, "stores": 0, "loads": 0})
        elif match := PROPERTIES.search(line):
            function = match["name"]
        elif current is not None and (match := STACK.search(line)):
            # A kernel's functions follow it, and its stack has theirs.
            current["stack"] = max(current["stack"], int(match["stack"]))
            current["stores"] += int(match["stores"])
            current["loads"] += int(match["loads"])
            if int(match["stores"]) or int(match["loads"]):
                spilling.setdefault(entry, []).append(function)
        elif current is not None and (match := USED.search(line)):
            current["registers"] = int(match["registers"])
            if shared := SHARED.search(line):
                current["shared"] = int(shared["bytes"])
        if IGNORED.search(line):
            faults.append(f"ptxas ignored setmaxnreg: {line.strip()}")
        if SERIALISED.search(line):
            match = IN_FUNCTION.search(line)
            if match and HOT.search(match["name"]):
                faults.append(f"hot kernel {match['name']}: wgmma is serialised: {line.strip()}")
        if not CHATTER.search(line):
            rest.append(line)
    for (name, arch), kernel in kernels.items():
        hot = HOT.search(name)
        if (name, arch) in spilling and (hot or not fast):
            faults.append(f"kernel {name}, {arch}: found {kernel['stores']} bytes of spill stores and "
                          f"{kernel['loads']} of spill loads in {', '.join(spilling[name, arch])} "
                          f"with {kernel['registers']} registers, wanted none; need fewer live "
                          f"values, or __launch_bounds__ with a smaller block")
        elif hot and kernel["stack"]:
            faults.append(f"hot kernel {name}, {arch}: found a stack frame of {kernel['stack']} bytes, "
                          f"wanted none; an array is indexed at run time, or a call was not inlined")
    return kernels, faults, rest


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", check=False)
    kernels, faults, rest = examine(done.stdout, any(FAST.search(word) for word in command))
    print("\n".join(line for line in rest if line.strip()))
    names = readable(list({name for name, _ in kernels}))
    for (name, arch), kernel in kernels.items():
        print(f"  {arch} {names.get(name, name)}: {kernel['registers']} registers, "
              f"{kernel['shared']} B shared, {kernel['stack']} B stack, "
              f"{kernel['stores']}+{kernel['loads']} B spilled")
    if done.returncode:
        return done.returncode
    if "-o" in command:
        figures = [{"name": names.get(name, name), "arch": arch, **kernel}
                   for (name, arch), kernel in kernels.items()]
        with open(command[command.index("-o") + 1] + ".json", "w", encoding="utf-8") as stream:
            json.dump(figures, stream)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        # A failed build step must not leave an object that looks finished.
        if "-o" in command:
            subprocess.run(["rm", "-f", command[command.index("-o") + 1]], check=False)
        return 1
    return 0


def table(folder):
    """Each kernel's registers by architecture, and what it spills or keeps on the stack."""
    found, archs = {}, set()
    for path in sorted(pathlib.Path(folder).rglob("*.o.json")):
        with open(path, encoding="utf-8") as stream:
            for kernel in json.load(stream):
                short = re.sub(r"\(.*\)$", "", kernel["name"].replace("(anonymous namespace)::", ""))
                found.setdefault((path.name.split(".")[0] + ".cu", short), {})[kernel["arch"]] = kernel
                archs.add(kernel["arch"])
    archs = sorted(archs)
    rows = ["| source | kernel | " + " | ".join(f"registers, {arch}" for arch in archs) +
            " | shared, B | stack, B | spilled, B |", "|---" * (len(archs) + 5) + "|"]
    for (source, name), by_arch in sorted(found.items()):
        def most(key, kernels=by_arch):
            return max(kernel[key] for kernel in kernels.values())
        registers = [str(by_arch[arch]["registers"]) if arch in by_arch else "" for arch in archs]
        rows.append(f"| {source} | `{name}` | " + " | ".join(registers) +
                    f" | {most('shared')} | {most('stack')} | {most('stores') + most('loads')} |")
    return "\n".join(rows)


def self_test():
    def text(name, stack, stores, loads, extra="", arch="sm_90a"):
        return (f"ptxas info    : 0 bytes gmem\n"
                f"ptxas info    : Compiling entry function '{name}' for '{arch}'\n"
                f"ptxas info    : Function properties for {name}\n"
                f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
                f"ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem\n{extra}")

    def faults(*arguments, fast=False):
        return examine(text(*arguments), fast)[1]

    assert not faults("_Z7hot_putPm", 0, 0, 0)
    assert "spill" in faults("_Z7hot_putPm", 8, 8, 4)[0]
    assert "stack frame" in faults("_Z7hot_putPm", 16, 0, 0)[0]
    assert "spill" in faults("_ZN6belfry7hot_putILi3EEEvPm", 8, 8, 4)[0]
    assert "spill" in faults("hot_plain", 8, 8, 4)[0]
    assert "spill" in faults("_Z7hot_putPm", 8, 8, 4, fast=True)[0]
    assert "spill" in faults("_Z3putPm", 8, 8, 4)[0]
    assert not faults("_Z3putPm", 8, 8, 4, fast=True)
    assert not faults("_Z8shot_putPm", 8, 0, 0)
    called = ("ptxas info    : Function properties for _Z4calli\n"
              "    0 bytes stack frame, {} bytes spill stores, 0 bytes spill loads\n")
    assert not faults("_Z3putPm", 8, 0, 0, called.format(0))
    assert "_Z4calli" in faults("_Z3putPm", 8, 0, 0, called.format(4))[0]
    assert "setmaxnreg" in faults(
        "_Z3putPm", 0, 0, 0,
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain "
        "minimum register requirements.\n")[0]
    serialised = ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions "
                  "are serialized due to insufficient register resources for the wgmma pipeline in "
                  "the function '{}'\n")
    assert "serialised" in faults("_Z7hot_mmaPm", 0, 0, 0, serialised.format("_Z7hot_mmaPm"))[0]
    assert not faults("_Z3mmaPm", 0, 0, 0, serialised.format("_Z3mmaPm"))
    kernels, _, rest = examine(text("_Z3putPm", 8, 4, 2) + "kernel.cu(3): warning: odd\n")
    assert kernels == {("_Z3putPm", "sm_90a"): {"registers": 40, "shared": 1024, "stack": 8,
                                                "stores": 4, "loads": 2}}
    both = examine(text("_Z7hot_putPm", 8, 8, 4, arch="sm_80") + text("_Z7hot_putPm", 0, 0, 0))[1]
    assert len(both) == 1 and "sm_80" in both[0]
    assert rest == ["kernel.cu(3): warning: odd"]
    print("check_ptxas: each fault is found, and nothing else")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        sys.exit(self_test())
    if len(sys.argv) == 3 and sys.argv[1] == "--table":
        print(table(sys.argv[2]))
        sys.exit(0)
    if len(sys.argv) < 3 or sys.argv[1] != "--":
        sys.exit(__doc__)
    sys.exit(run(sys.argv[2:]))
