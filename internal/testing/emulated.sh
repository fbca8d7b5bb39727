#!/bin/sh
# What go test -exec runs a program of arm64 by. The program's Args[0] is a script that runs it
# emulated, too, so that tests which start it again need nothing of the system (binfmt_misc).
set -eu
dir=$(mktemp -d)
trap 'rm -r "$dir"' EXIT
program=$1
shift
printf '#!/bin/sh\nexec qemu-aarch64 -0 "$0" "%s" "$@"\n' "$program" >"$dir/test"
chmod +x "$dir/test"
"$dir/test" "$@"
