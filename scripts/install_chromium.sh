#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs Debian's packages of Chromium, in which tests of the studio open its page, and of npm, from which they get
# their tools, unless they are installed. Without apt or the right to install, prints why the tests will be skipped.

set -euo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
command -v npm >/dev/null || missing+=(npm)
if [[ ${#missing[@]} == 0 ]]; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
    echo "${missing[*]} missing, and cannot be installed without apt-get and root; tests of the studio will be skipped." >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
if ! apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null; then
    echo "${missing[*]} could not be installed by apt-get; tests of the studio will be skipped." >&2
fi
