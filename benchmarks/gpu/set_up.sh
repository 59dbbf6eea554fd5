#!/bin/sh
# set_up.sh VENV PYTHON: a virtual environment for a machine with GPUs, with the CUDA build of torch that PYTHON has, or
# without one with PyPI's. pip reads PIP_INDEX_URL, PIP_NO_INDEX and PIP_FIND_LINKS by itself. No op of DeepSpeed is built.
set -eu
venv=$1 python=$2
rm -rf "$venv"
"$python" -m venv "$venv"
pinned=$venv/constraints.txt
cp constraints.txt "$pinned"
if found=$("$python" -c 'import torch; print(torch.__version__.partition("+")[0] if torch.version.cuda or torch.version.hip else exit(1))' 2>/dev/null); then
  echo "torch $found of $python is used"
  # A path, because --system-site-packages does not show the packages of another virtual environment.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > "$site/with_torch.pth"
  sed -i "s/^torch==.*/torch==$found/" "$pinned"
else
  "$venv/bin/python" -m pip install --quiet --constraint "$pinned" torch
fi
install() {
  "$venv/bin/python" -m pip install --quiet --constraint "$1" 'setuptools>=77' wheel &&
    DS_BUILD_OPS=0 "$venv/bin/python" -m pip install --quiet --constraint "$1" --no-build-isolation \
      --editable '.[lora]' pytest pytest-timeout ninja
}
# The pinned versions, or without a network those that are there already.
if ! install "$pinned"; then
  echo "the pinned versions cannot be installed: those that $python has are used"
  grep '^torch==' "$pinned" > "$venv/torch.txt"
  pinned=$venv/torch.txt
  install "$pinned"
fi
"$venv/bin/python" -m pip install --quiet --constraint "$pinned" 'liger-kernel>=0.8.5' ||
  echo "liger-kernel cannot be installed: what needs it is skipped"
# Not torchao: transformers imports it where it is installed, which initializes CUDA, and then ranks cannot be forked.
"$venv/bin/python" -c 'import torch; assert torch.cuda.is_available(), "torch finds no GPU: see `dstk doctor`"'
touch "$venv/.installed"
