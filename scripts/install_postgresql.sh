#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs Debian's package of PostgreSQL, which tests of the registry need, unless it is installed. The tests start
# servers of their own. Without apt or the right to install, prints why the tests will be skipped.

set -euo pipefail

if compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
    echo "PostgreSQL is missing and cannot be installed without apt-get and root; its tests will be skipped." >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends postgresql >/dev/null
