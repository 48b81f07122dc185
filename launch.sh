#!/usr/bin/env bash
# From a fresh machine to a result: makes an environment once, then runs a command in it.
# Kept to bash 3.2 and the Python standard library, since that is all a new Mac or VM has.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

default_config=configs/heads_sweep.py
venv=${MINIGPT_VENV:-.venv}
constraint=${MINIGPT_CONSTRAINTS:-}
no_venv='' all_tests=''
parts=() # what is installed besides requirements.txt

usage() {
  cat <<USAGE
usage: ./launch.sh [COMMAND] [OPTIONS] [FLAGS OF THE COMMAND]

Makes $venv and installs into it (once), then runs the command from the repository root.

commands:
  (none)      python -m minigpt_jax.train --config=$default_config
              another --config replaces that one, other flags are added to it:
              ./launch.sh --config=configs/shakespeare_char.py --config.train.steps=10
  test        ruff, the layers contract and pytest, offline on the CPU; --all adds the
              slow tests; other arguments go to pytest: ./launch.sh test tests/model -x
  help        this text

options:
  --accelerator=cuda|tpu|cpu  install jax for it (cuda: jax[cuda13]); remembered in $venv.
                              cpu also keeps this run off an accelerator that is there
  --no-venv                   install into the running Python and keep its jax and jaxlib;
                              the default on Colab
  --constraint=FILE           pip constraints (default: \$MINIGPT_CONSTRAINTS)
  --                          pass the rest on as it is: ./launch.sh -- --help

environment: PYTHON (the Python to use, 3.11 or newer), MINIGPT_VENV (default .venv).
Relative paths are taken from the repository root.
USAGE
}

say() { echo "launch.sh: $*" >&2; }

die() { # die STATUS MESSAGE
  say "$2"
  exit "$1"
}

# ---- The Python ---------------------------------------------------------------------------

version_of() { # nothing if it does not run: a pyenv shim exists even where its Python does not
  "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}

new_enough() { # new_enough 3.11.7
  local major=${1%%.*} rest=${1#*.}
  ((major == 3 && ${rest%%.*} >= 11))
}

find_python() { # sets python, found_version; a Python that was named is not replaced by another
  local found='' candidates=(python3 python3.13 python3.12 python3.11)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for python in "${candidates[@]}"; do
    found_version=$(version_of "$python")
    if [[ -n $found_version ]]; then
      new_enough "$found_version" && return
      found+="${found:+, }$python is $found_version"
    fi
  done
  : "${found:="${PYTHON:-python3} does not run"}"
  die 1 "Python 3.11 or newer is needed, but $found; install one, or name it: PYTHON=/path/to/python3.12 ./launch.sh"
}

# ---- Installing ---------------------------------------------------------------------------

test_group() { sed -n '/^\[dependency-groups\]/,/^\[[^d]/p' pyproject.toml; }

pip_install() { # pip_install PYTHON [ARGUMENTS OF PIP]
  local python=$1 part
  shift
  set -- "$@" -r requirements.txt
  for part in ${parts[@]+"${parts[@]}"}; do
    case $part in
      cuda) set -- "$@" 'jax[cuda13]' ;;
      tpu) set -- "$@" 'jax[tpu]' ;;
      test) # pip reads dependency groups only since 25.1, newer than what many Pythons carry
        "$python" -c 'import tomllib
with open("pyproject.toml", "rb") as f:
    print(*tomllib.load(f)["dependency-groups"]["test"], sep="\n")' >"$scratch/test.txt"
        set -- "$@" -r "$scratch/test.txt"
        ;;
    esac
  done
  [[ -z $constraint ]] || set -- "$@" -c "$constraint"
  # Twice quiet: errors are still said, but not the warnings about the index of a machine.
  "$python" -m pip install -qq --disable-pip-version-check --no-input "$@" ||
    die 1 "the installation failed, as pip says above; run the same command to try again"
}

wanted_state() { # all that decides what is installed; compared as text, so that diff explains
  grep '^version' "$venv/pyvenv.cfg" || true
  cat "$venv/.parts" requirements.txt ${constraint:+"$constraint"}
  ! grep -qx test "$venv/.parts" || test_group
}

is_installed() {
  local part
  [[ -x $venv/bin/python && -s $venv/.installed ]] || return 1
  for part in ${parts[@]+"${parts[@]}"}; do
    grep -qx "$part" "$venv/.parts" || return 1
  done
  [[ $(wanted_state 2>/dev/null) == "$(<"$venv/.installed")" ]] || return 1
  # Without $PYTHON any Python that the environment was made with is right, and none is started.
  [[ -z ${PYTHON:-} ]] || grep -q "^version.* $(version_of "$PYTHON")\$" "$venv/pyvenv.cfg"
}

# The caller holds fd 9 on .parts, which therefore has to survive when the rest is cleared away.
install_into_venv() {
  local part in_venv
  "$python" -c 'import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("launch.sh: waiting for another installation to finish", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)' >&2 || say 'no lock on this file system: do not start two at once'
  if is_installed; then return; fi

  for part in ${parts[@]+"${parts[@]}"}; do
    grep -qx "$part" "$venv/.parts" || echo "$part" >>"$venv/.parts"
  done
  parts=()
  while read -r part; do parts+=("$part"); done <"$venv/.parts"

  if [[ -f $venv/pyvenv.cfg ]]; then
    # An empty stamp is an installation that was cut off; pip can take half a package for a whole.
    in_venv=$(version_of "$venv/bin/python")
    if [[ -f $venv/.installed && ! -s $venv/.installed ]] || [[ -z $in_venv ]] ||
      ! new_enough "$in_venv" || [[ -n ${PYTHON:-} && $in_venv != "$found_version" ]]; then
      say "remaking $venv"
      find "$venv" -mindepth 1 -maxdepth 1 ! -name .parts -exec rm -rf {} +
      in_venv=''
    fi
  fi

  say "installing (once) into $venv with Python ${in_venv:-$found_version}, a few minutes ..."
  : >"$venv/.installed"
  [[ -f $venv/pyvenv.cfg ]] || "$python" -m venv "$venv"
  pip_install "$venv/bin/python"
  wanted_state >"$venv/.installed"
}

ensure_venv() {
  if is_installed; then return; fi
  find_python
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die 1 "Python $found_version ($python) has no venv or no pip; on Debian or Ubuntu: apt install python3-venv"
  mkdir -p "$venv"
  (install_into_venv) 9>>"$venv/.parts"
}

# Replacing the jax of a hosted notebook would lose its accelerator. No stamp here: that Python
# belongs to somebody else, so pip is asked each time whether all is there.
ensure_no_venv() {
  local kept shown
  find_python
  "$python" -m pip --version >/dev/null 2>&1 ||
    die 1 "Python $found_version ($python) has no pip; on Debian or Ubuntu: apt install python3-pip"
  kept=$("$python" -c 'from importlib import metadata
for name in ("jax", "jaxlib"):
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass')
  shown=${kept//$'\n'/ }
  say "installing what is missing into $python ($found_version), keeping ${shown:-no jax, for it has none} ..."
  echo "$kept" >"$scratch/keep.txt"
  pip_install "$python" -c "$scratch/keep.txt"
}

on_colab() {
  [[ -n ${COLAB_RELEASE_TAG:-} ]] ||
    { [[ -d /content ]] && python3 -c 'import google.colab' 2>/dev/null; }
}

ensure_installed() { # sets python to the one that has everything
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  if [[ -n $no_venv ]] || on_colab; then
    ensure_no_venv
  else
    ensure_venv
    python=$venv/bin/python
  fi
  rm -rf "$scratch" # here as well, since exec runs no traps
}

# ---- Commands: each has the flags that were passed on as its arguments ---------------------

command_train() {
  local flag
  for flag; do
    case $flag in
      --config | --config=* | -config | -config=*) exec "$python" -m minigpt_jax.train "$@" ;;
    esac
  done
  exec "$python" -m minigpt_jax.train --config="$default_config" "$@"
}

command_test() {
  local failed=''
  part() { # part NAME COMMAND: all of them run, whatever fails
    echo "== $1"
    "${@:2}" || failed+="${failed:+, }$1"
  }
  export JAX_PLATFORMS=cpu
  part 'ruff check' "$python" -m ruff check .
  part 'ruff format' "$python" -m ruff format --check .
  part 'lint-imports' "$python" -c 'from importlinter.cli import lint_imports_command as main; main()' --no-logo
  [[ -n $all_tests ]] || set -- -m 'not slow' "$@"
  # Last, so that the closing line of pytest is the last one when all is well.
  part 'pytest' "$python" -m pytest -n 2 --dist worksteal --durations=20 "$@"
  [[ -z $failed ]] || die 1 "failed: $failed"
}

# ---- The command line ---------------------------------------------------------------------

command=train
case ${1:-} in
  help) usage && exit ;;
  test) command=$1 && shift ;;
  -* | '') ;;
  *) die 2 "unknown command '$1'; it is one of: test, help, or none at all to train" ;;
esac

flags=()
while (($#)); do
  case $1 in
    -h | --help) usage && exit ;;
    --accelerator=cpu) export JAX_PLATFORMS=cpu ;;
    --accelerator=cuda | --accelerator=tpu) parts+=("${1#*=}") ;;
    --accelerator=*) die 2 "unknown accelerator '${1#*=}'; it is one of: cuda, tpu, cpu" ;;
    --constraint=*) constraint=${1#*=} ;;
    --accelerator | --constraint) die 2 "write $1=VALUE" ;;
    --no-venv) no_venv=yes ;;
    --) shift && flags+=("$@") && break ;;
    *) if [[ $command == test && $1 == --all ]]; then all_tests=yes; else flags+=("$1"); fi ;;
  esac
  shift
done

[[ -z $constraint || -f $constraint ]] || die 2 "no constraints file '$constraint'"
[[ $command != test ]] || parts+=(test)

ensure_installed
"command_$command" ${flags[@]+"${flags[@]}"}
