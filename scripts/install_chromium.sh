#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs Debian's package of Chromium, in which tests of the studio open its page, unless it is installed. Without apt
# or the right to install, prints why the tests will be skipped.

set -euo pipefail

if command -v chromium >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
    echo "Chromium is missing and cannot be installed without apt-get and root; tests of the studio will be skipped." >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
if ! apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; then
    echo "Chromium could not be installed by apt-get; tests of the studio will be skipped." >&2
fi
