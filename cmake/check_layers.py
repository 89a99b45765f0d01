#!/usr/bin/env python3
"""Holds the layers of docs/architecture.md against the #include lines of the tree.

    check_layers.py includes ROOT    each file includes only what stands below it
    check_layers.py readmes ROOT     each layer's folder says what lives there
    check_layers.py self-test        the first check finds what it should

A layer may include itself, every layer of a lower row, and of its own row only what SIBLINGS
names. A public header (include/) may include public headers only, and so may the examples.
"""
import os
import re
import sys
import tempfile

# Row by row from the bottom: (layer, the files and folders that are it). A longer path wins.
ROWS = [
    [("platform", ["include/belfry/platform.hpp", "include/belfry/status.hpp",
                   "include/belfry/simt.hpp", "include/belfry/wait.hpp",
                   "include/belfry/kernel.hpp", "include/belfry/stream.hpp"])],
    [("mlx5", ["include/belfry/mlx5/"])],
    [("queue", ["include/belfry/queue/"])],
    [("device", ["include/belfry/device/"])],
    [("simt", ["src/simt/", "include/belfry/launch.hpp"]),
     ("topology", ["src/topology/", "include/belfry/topology.hpp"]),
     ("memory", ["src/memory/", "include/belfry/memory.hpp"]),
     ("bootstrap", ["src/bootstrap/", "include/belfry/bootstrap.hpp"]),
     ("softnic", ["src/softnic/", "include/belfry/softnic.hpp", "include/belfry/softnic/"])],
    [("provider", ["src/provider/", "include/belfry/provider.hpp"]),
     ("uverbs", ["src/uverbs/"])],
    [("path", ["src/path/", "include/belfry/path.hpp"])],
    [("comm", ["src/comm/", "include/belfry/comm.hpp", "include/belfry/belfry.hpp"])],
    [("tools", ["tools/"]), ("examples", ["examples/"])],
]

# Within a row: who may include whom, and why.
SIBLINGS = {
    ("softnic", "memory"): "its memory table maps the segments that peers registered",
}

PUBLIC_ONLY = ("include/", "examples/")
SOURCES = (".hpp", ".h", ".cpp", ".cu", ".cuh")
SCANNED = ("include", "src", "tools", "examples")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def layer_of(path):
    """(row, layer) of a path relative to the root, or None when the table does not know it."""
    best, length = None, -1
    for row, layers in enumerate(ROWS):
        for name, places in layers:
            for place in places:
                if (path == place or (place.endswith("/") and path.startswith(place))) \
                        and len(place) > length:
                    best, length = (row, name), len(place)
    return best


def files(root):
    for top in SCANNED:
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in names:
                if name.endswith(SOURCES):
                    yield os.path.relpath(os.path.join(folder, name), root)


def resolve(root, path, quote, target):
    """Where an include points inside the tree, or None when it is not of the tree."""
    places = [os.path.dirname(path)] if quote == '"' else []
    for place in places + ["include", "src"]:
        candidate = os.path.normpath(os.path.join(place, target))
        if os.path.isfile(os.path.join(root, candidate)):
            return candidate
    return None


def wrong_includes(root):
    wrong = []
    for path in sorted(files(root)):
        mine = layer_of(path)
        if mine is None:
            wrong.append(f"{path}: no layer holds it; add it to ROWS in cmake/check_layers.py")
            continue
        with open(os.path.join(root, path), encoding="utf-8") as stream:
            text = stream.read()
        for match in INCLUDE.finditer(text):
            target = resolve(root, path, *match.groups())
            if target is None:
                continue
            where = f"{path}:{text.count(chr(10), 0, match.start(2)) + 1}"
            if path.startswith(PUBLIC_ONLY) and not target.startswith("include/") \
                    and target.split("/")[0] != path.split("/")[0]:
                wrong.append(f"{where}: includes the private {target}; from {path.split('/')[0]}/ "
                             f"only include/ may be used")
                continue
            theirs = layer_of(target)
            if theirs is None:
                wrong.append(f"{where}: includes {target}, which no layer holds")
            elif theirs[1] != mine[1] and theirs[0] >= mine[0] \
                    and (mine[1], theirs[1]) not in SIBLINGS:
                wrong.append(f"{where}: the layer {mine[1]} includes {target} of {theirs[1]}, "
                             f"which does not stand below it")
    return wrong


def missing_readmes(root):
    missing = []
    for top in ("include/belfry", "src", "tools"):
        for name in sorted(os.listdir(os.path.join(root, top))):
            folder = os.path.join(top, name)
            held = [file for _, _, found in os.walk(os.path.join(root, folder)) for file in found]
            if any(file.endswith(SOURCES) for file in held) \
                    and not os.path.isfile(os.path.join(root, folder, "README.md")):
                missing.append(f"{folder}: has no README.md; write one paragraph: what lives here, "
                               f"what may be included, what never")
    return missing


def self_test():
    tree = {
        "include/belfry/platform.hpp": "#include <cstdint>\n",
        "include/belfry/mlx5/wqe.hpp": '#include "belfry/platform.hpp"\n#include "endian.hpp"\n',
        "include/belfry/mlx5/endian.hpp": "",
        "include/belfry/queue/ring.hpp": '#include "belfry/mlx5/wqe.hpp"\n',
        "include/belfry/comm.hpp": '#include "belfry/queue/ring.hpp"\n',
        "src/memory/table.hpp": '#include "belfry/queue/ring.hpp"\n',
        "src/softnic/engine.hpp": '#include "memory/table.hpp"\n',
        "src/comm/comm.cpp": '#include "belfry/comm.hpp"\n#include "softnic/engine.hpp"\n',
        "examples/ring.cpp": '#include "belfry/comm.hpp"\n',
    }
    # file, a line that breaks a rule, a word that the complaint must hold
    breaks = [
        ("include/belfry/platform.hpp", '#include "belfry/mlx5/wqe.hpp"', "does not stand below"),
        ("include/belfry/mlx5/wqe.hpp", "#include <belfry/queue/ring.hpp>", "does not stand below"),
        ("include/belfry/mlx5/wqe.hpp", '#  include "../queue/ring.hpp"', "does not stand below"),
        ("src/memory/table.hpp", '#include "softnic/engine.hpp"', "does not stand below"),
        ("src/softnic/engine.hpp", '#include "belfry/comm.hpp"', "does not stand below"),
        ("include/belfry/comm.hpp", '#include "softnic/engine.hpp"', "private"),
        ("examples/ring.cpp", '#include "softnic/engine.hpp"', "private"),
        ("src/new_folder/thing.hpp", "", "no layer holds it"),
        ("include/belfry/odd.hpp", "", "no layer holds it"),
    ]

    def check(extra=None):
        with tempfile.TemporaryDirectory() as root:
            for path, text in tree.items():
                full = os.path.join(root, path)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w", encoding="utf-8") as stream:
                    stream.write(text)
            if extra:
                full = os.path.join(root, extra[0])
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "a", encoding="utf-8") as stream:
                    stream.write(extra[1] + "\n")
            return wrong_includes(root)

    assert check() == [], check()
    for path, line, word in breaks:
        found = check((path, line))
        assert len(found) == 1 and word in found[0] and found[0].startswith(path), (path, line, found)
    return []


def main():
    checks = {"includes": wrong_includes, "readmes": missing_readmes}
    if sys.argv[1:] == ["self-test"]:
        found = self_test()
    elif len(sys.argv) == 3 and sys.argv[1] in checks:
        found = checks[sys.argv[1]](sys.argv[2])
    else:
        sys.exit(__doc__)
    for line in found:
        print(line)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
