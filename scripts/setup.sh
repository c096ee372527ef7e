#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Creates .venv with the pinned vLLM, vllm_steer in editable form, and the development tools.
# Does nothing if the files that it installs from are unchanged, or if .venv is a link. Writes only to .venv.
#
#   PYTHON=...   the Python to use (default: the first suitable of python3.11, 3.12, 3.13, python3 and python)
#   LANE=...     cpu (default) or cuda: which build of vLLM

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ROOT=$(pwd -P)
LANE=${LANE:-cpu}
VENV=.venv
VENV_PYTHON=$ROOT/$VENV/bin/python
LOG=$VENV/setup.log
STAMP=$VENV/setup.stamp
WANTED="Python 3.11, 3.12 or 3.13 with its venv module"

fail() {
    echo "set-up: $1" >&2
    exit 1
}

log() { echo "set-up: $1 ($SECONDS s)"; }

case $LANE in
    cpu) SOURCES=(requirements/cpu.txt requirements/vllm-metadata/pyproject.toml) ;;
    cuda) SOURCES=(requirements/cuda.txt) ;;
    *) fail "LANE is '$LANE'; use cpu or cuda." ;;
esac
SOURCES+=(requirements/dev.txt pyproject.toml scripts/setup.sh)

# Prints a line that identifies the result of the set-up. $1: a Python.
fingerprint() {
    "$1" -c '
import hashlib, sys
digest = hashlib.sha256(b"".join(open(name, "rb").read() for name in sys.argv[3:]))
print(sys.argv[1], sys.version.split()[0], digest.hexdigest(), sys.argv[2])
' "$LANE" "$ROOT" "${SOURCES[@]}" 2>/dev/null
}

# Prints why Python $1 is unsuitable, or nothing.
problem_with() {
    command -v "$1" >/dev/null || { echo "was not found"; return; }
    "$1" -c '
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    print("is Python %d.%d" % sys.version_info[:2])
    sys.exit()
try:
    import ensurepip, venv
except ImportError as error:
    print("lacks a module (%s)" % error)
' 2>/dev/null || echo "does not run"
}

# Prints a suitable Python, or fails with the reasons why the existing ones are unsuitable.
find_python() {
    local candidate problem seen=""
    if [[ -n ${PYTHON:-} ]]; then
        problem=$(problem_with "$PYTHON")
        [[ -z $problem ]] || fail "PYTHON=$PYTHON $problem; vllm-steer needs $WANTED."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        problem=$(problem_with "$candidate")
        [[ -n $problem ]] || { echo "$candidate"; return; }
        [[ $problem == "was not found" ]] || seen+=" ($candidate $problem)"
    done
    fail "no $WANTED was found$seen; install one, or set PYTHON: make setup PYTHON=/path/to/python3.11."
}

# Succeeds if the environment works and was created in this folder (scripts contain absolute paths) by Python version $1 for this lane.
venv_is_usable() {
    [[ $("$VENV_PYTHON" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null) == "$1" ]] &&
        head -n 2 "$VENV/bin/pip" 2>/dev/null | grep -qF "$ROOT/$VENV/" &&
        [[ $(cat "$VENV/lane" 2>/dev/null || echo "$LANE") == "$LANE" ]]
}

# Installs the arguments without their dependencies. On failure, prints one sentence about pip's output. Does not compile
# bytecode, because compiling all files takes a minute and most are never imported.
pip_install() {
    "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-input --no-cache-dir --no-compile --no-deps \
        --retries 3 --progress-bar off "$@" >"$LOG" 2>&1 && return
    local reason
    if grep -qE 'connection broken|Max retries|NewConnectionError|NameResolutionError|timed out|SSLError|ProxyError' "$LOG"; then
        reason="the package index cannot be reached; check the network and \`pip config list\`"
    elif grep -q 'No space left on device' "$LOG"; then
        reason="the disk is full"
    elif grep -q 'No matching distribution found' "$LOG"; then
        reason="pip finds no $(sed -n 's/.*No matching distribution found for //p' "$LOG" | tail -n 1) for this Python and platform"
    else
        reason="pip failed: $(grep -E '^(ERROR|error)' "$LOG" | tail -n 1)"
    fi
    fail "$reason; pip's output is in $LOG."
}

# pip installs a CPU build of torch only if an index offers one. A CUDA build, recognised by its requirements, cannot be imported
# without CUDA's libraries; it is removed again, so that the next run does not keep it.
check_cpu_torch() {
    "$VENV_PYTHON" -c '
import importlib.metadata, sys
sys.exit(any(name.startswith(("cuda-", "nvidia-")) for name in importlib.metadata.requires("torch") or ()))
' && return
    "$VENV_PYTHON" -m pip uninstall --yes --quiet torch >>"$LOG" 2>&1 || true
    fail "pip installed a CUDA build of torch; set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and try again."
}

# A link leads to the environment of another checkout, which must not be emptied through it.
if [[ -L $VENV ]]; then
    [[ -x $VENV_PYTHON ]] || fail "$VENV is a link to $(readlink "$VENV"), which has no Python; run \`make setup\` there."
    exit 0
fi

if [[ -f $STAMP && $(fingerprint "${PYTHON:-$VENV_PYTHON}") == "$(cat "$STAMP")" ]]; then
    exit 0
fi

python=$(find_python)
version=$("$python" -c 'import sys; print(sys.version.split()[0])')
if ! venv_is_usable "$version"; then
    log "creating $VENV with Python $version"
    "$python" -m venv --clear "$VENV" || fail "Python $version cannot create a virtual environment in $ROOT."
fi
rm -f "$STAMP"
echo "$LANE" >"$VENV/lane"

count=$(cat "requirements/$LANE.txt" requirements/dev.txt | grep -c '==')
log "installing vLLM ($LANE build) and the tools: $count packages, one to three minutes"
pip_install -r "requirements/$LANE.txt" -r requirements/dev.txt
log "installing vllm_steer"
shim=()
if [[ $LANE == cpu ]]; then
    check_cpu_torch
    shim=(./requirements/vllm-metadata)
fi
pip_install --no-build-isolation --editable . "${shim[@]}"
fingerprint "$VENV_PYTHON" >"$STAMP"
log "done"
