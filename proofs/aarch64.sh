#!/usr/bin/env bash
# An arm64 Python with NumPy in a folder, to run under user-mode emulation: aarch64.sh FOLDER. Debian 12, as root.
set -euo pipefail
folder=$1
dpkg --add-architecture arm64
apt-get update -q
apt-get install -y -q qemu-user-static
mkdir -p "$folder/debs" "$folder/root" "$folder/wheels" "$folder/site"
packages="libc6 libgcc-s1 libstdc++6 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib zlib1g libexpat1 libffi8
  libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 gcc-12-base"
cd "$folder/debs"
for package in $packages; do apt-get download -q "$package:arm64"; done
for deb in *.deb; do dpkg -x "$deb" "$folder/root"; done
python3 -m pip download -q --only-binary=:all: --no-deps --python-version 3.11 -d "$folder/wheels" \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
  numpy safetensors tokenizers
for wheel in "$folder"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$folder/site"; done
