"""QEMU guests as hosts: Debian's kernel with soft-RoCE, a virtual link between two of them, and
commands that are run in them by a serial line. No KVM is needed."""
import ctypes
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

MODULES = ("virtio_pci", "virtio_net", "ib_uverbs", "rdma_rxe", "sch_netem", "crc32_generic",
           "crc32c_generic")
# rxe's library, and what tells libibverbs of it.
PROVIDER = ("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so",
            "/etc/libibverbs.d/rxe.driver")
LIBGCC = "/lib/x86_64-linux-gnu/libgcc_s.so.1"
ADDRESSES = ("10.77.8.1", "10.77.8.2")


class Failure(Exception):
    pass


def run(*argv, **options):
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          **options)
    if done.returncode != 0:
        raise Failure(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def which(program):
    found = shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if found is None:
        raise Failure(f"{program} was not found; ./dev rxe-test installs the package that has it")
    return found


# --- the guests' file system --------------------------------------------------------------------


def copy(source, root, target):
    target = os.path.join(root, target.lstrip("/"))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy(source, target)


def libraries(program):
    """What the dynamic loader would load; a static program has none."""
    text = subprocess.run(["ldd", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True).stdout
    if "not found" in text:
        raise Failure(f"ldd {program}: {text}")
    return re.findall(r"(/\S+\.so\S*) \(", text)


def copy_modules(kernel, root):
    """The modules with what they need, uncompressed."""
    folder = os.path.join(kernel, "lib/modules")
    version = os.listdir(folder)[0]
    if not os.path.exists(os.path.join(folder, version, "modules.dep")):
        run(which("depmod"), "-b", kernel, version)
    files = set()
    for module in MODULES:
        for line in run(which("modprobe"), "-d", kernel, "-S", version, "--show-depends",
                        module).splitlines():
            words = line.split()
            if words[0] == "insmod":
                files.add(words[1])
    for file in files:
        target = file[file.index("/lib/modules/"):]
        if file.endswith(".xz"):
            copy(file, root, target)
            run(which("xz"), "-d", os.path.join(root, target.lstrip("/")))
        else:
            copy(file, root, target)
    for file in ("modules.builtin", "modules.order"):
        copy(os.path.join(folder, version, file), root, f"/lib/modules/{version}/{file}")
    run(which("depmod"), "-b", root, version)


def make_image(kernel, programs, file):
    """An initramfs with these programs in /bin beside busybox's."""
    root = file + ".root"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "dev", "etc", "lib", "lib64", "proc", "sys", "tmp"):
        os.makedirs(os.path.join(root, folder))
    os.symlink("bin", os.path.join(root, "sbin"))
    os.symlink(".", os.path.join(root, "usr"))
    busybox = which("busybox")
    copy(busybox, root, "/bin/busybox")
    for applet in set(run(busybox, "--list").split()) - {"busybox"}:
        os.symlink("busybox", os.path.join(root, "bin", applet))
    # In the place of busybox's own.
    own = [which(name) for name in ("ip", "tc", "rdma", "kmod", "ibv_devinfo", "ib_write_lat",
                                    "ib_write_bw")]
    for program in [*own, *programs]:
        target = os.path.join(root, "bin", os.path.basename(program))
        if os.path.lexists(target):
            os.unlink(target)
        copy(program, root, f"/bin/{os.path.basename(program)}")
    for name in ("modprobe", "insmod", "lsmod", "rmmod", "depmod"):
        link = os.path.join(root, "bin", name)
        if os.path.lexists(link):
            os.unlink(link)
        os.symlink("kmod", link)
    for program in PROVIDER:
        copy(program, root, program)
    for program in [*own, *programs, PROVIDER[0]]:
        for library in libraries(program):
            copy(library, root, library)
    # A thread that ends loads it by name.
    copy(LIBGCC, root, LIBGCC)
    copy_modules(kernel, root)
    copy(os.path.join(os.path.dirname(os.path.abspath(__file__)), "init"), root, "/init")
    os.chmod(os.path.join(root, "init"), 0o755)
    with open(os.path.join(root, "etc/hosts"), "w") as stream:
        stream.write("127.0.0.1 localhost\n")
    with open(os.path.join(root, "etc/passwd"), "w") as stream:
        stream.write("root:x:0:0::/tmp:/bin/sh\n")
    names = run("find", ".", cwd=root)
    with open(file + ".part", "wb") as stream:
        subprocess.run([which("cpio"), "-o", "-H", "newc", "--quiet"], cwd=root, check=True,
                       input=names.encode(), stdout=stream)
    os.replace(file + ".part", file)
    shutil.rmtree(root)


# --- a guest ------------------------------------------------------------------------------------


def die_with_parent():
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Command:
    """A command that runs in a guest."""

    def __init__(self, guest, text):
        self.guest, self.text = guest, text
        self.lines = queue.Queue()
        self.output = []

    def line(self, deadline):
        """The next line, or None when the command has ended; `deadline` is of time.monotonic()."""
        try:
            line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise Failure(f"guest {self.guest.name}: '{self.text}' did not go on in time; so far:\n"
                          + "\n".join(self.output)) from None
        if line is None:
            raise Failure(f"guest {self.guest.name} ended during '{self.text}'; see "
                          f"{self.guest.console}")
        if line.startswith("@end "):
            self.code = int(line[5:])
            return None
        self.output.append(line)
        return line

    def finish(self, deadline):
        while self.line(deadline) is not None:
            pass
        if self.code != 0:
            raise Failure(f"guest {self.guest.name}: '{self.text}' ended with {self.code}:\n"
                          + "\n".join(self.output))
        return "\n".join(self.output)


class Guest:
    def __init__(self, number, kernel, image, folder, seconds, accelerator):
        self.name = "ab"[number]
        self.console = os.path.join(folder, f"console-{self.name}.log")
        sockets = [os.path.join(folder, f"{end}.sock") for end in "ab"]
        mine, other = sockets[number], sockets[1 - number]
        # Two serial lines: the kernel's console, and the commands.
        self.process = subprocess.Popen(
            [which("qemu-system-x86_64"), "-accel", accelerator, "-smp", "1", "-m", "768",
             "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
             "-serial", f"file:{self.console}", "-serial", "stdio",
             "-kernel", kernel, "-initrd", image,
             "-append", "console=ttyS0 quiet panic=-1 mitigations=off "
                        f"belfry.address={ADDRESSES[number]} belfry.seconds={seconds}",
             "-netdev", f"dgram,id=link,local.type=unix,local.path={mine},"
                        f"remote.type=unix,remote.path={other}",
             "-device", f"virtio-net-pci,netdev=link,mac=52:54:00:00:08:{number + 1:02x}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr,
            preexec_fn=die_with_parent)
        self.commands = {}
        self.lock = threading.Lock()
        self.booting = self.add(Command(self, "boot"))
        threading.Thread(target=self.listen, daemon=True).start()

    def add(self, command):
        with self.lock:
            self.commands[len(self.commands)] = command
        return command

    def listen(self):
        for raw in self.process.stdout:
            number, _, text = raw.decode(errors="replace").rstrip("\r\n").partition(" ")
            if number.isdigit() and int(number) in self.commands:
                self.commands[int(number)].lines.put(text)
        for command in self.commands.values():
            command.lines.put(None)

    def start(self, text):
        command = self.add(Command(self, text))
        number = len(self.commands) - 1
        self.process.stdin.write(f"{number} {text}\n".encode())
        self.process.stdin.flush()
        return command

    def run(self, text, seconds=30):
        return self.start(text).finish(time.monotonic() + seconds)

    def end(self):
        self.process.kill()
        self.process.wait()


class Pair:
    """Two guests that are joined; they end with the block."""

    def __init__(self, kernel, image, folder, seconds, accelerator):
        for end in "ab":
            path = os.path.join(folder, f"{end}.sock")
            if os.path.exists(path):
                os.unlink(path)
        self.guests = []
        try:
            for number in range(2):
                self.guests.append(Guest(number, kernel, image, folder, seconds, accelerator))
            for guest in self.guests:
                guest.booting.finish(time.monotonic() + 120)
            # The neighbours' addresses are learnt.
            self.guests[0].run(f"ping -c 3 -W 5 {ADDRESSES[1]}")
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for guest in self.guests:
            guest.end()

    def disturb(self, what):
        """netem's words for both directions, or nothing."""
        for guest in self.guests:
            guest.run("/bin/tc qdisc del dev eth0 root 2>/dev/null; true")
            if what:
                guest.run(f"/bin/tc qdisc add dev eth0 root netem limit 10000 {what}")
