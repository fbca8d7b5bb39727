#!/bin/sh
# start.sh PATTERN COMMAND ARGS...: the seconds from the start of COMMAND to the first line of its
# output that PATTERN (of grep -E) matches, or to its end if PATTERN is "end". It measures them with
# an empty cache of the CUDA driver, and again with the cache that this has filled; RUNS times (3 if
# not set), each with a new cache. Output that ends without such a line is printed.
#
#	sh bench/start.sh '^epoch' bin/digits --batch 1437 --epochs 1
#	sh bench/start.sh 'epoch' bin/euryale run -n 2 bin/digits --batch 1437 --epochs 1
#	sh bench/start.sh '^step' bin/gpt --steps 1 --data docs
#	sh bench/start.sh end bin/euryale doctor
#	sh bench/start.sh . python3 -c 'import torch; x = torch.ones(8, 8).cuda(); print(x @ x)'
#
# An epoch of digits is one step of such a batch. Where EURYALE_KERNELS names a folder with copies
# of internal/kernels/cuda/*.ptx.gz, the driver compiles what it loads as machine code otherwise.
set -e
pattern=$1
shift
dir=$(mktemp -d)
trap 'rm -r "$dir"' EXIT

# Runs the command, and prints the seconds; CUDA_CACHE_PATH is its cache.
measure() {
	began=$(date +%s%N)
	{ "$@" 2>&1 || echo "start.sh: it has failed: $*"; } | {
		while IFS= read -r line; do
			echo "$line" >>"$dir/output"
			if [ ! -s "$dir/end" ] && echo "$line" | grep -Eq "$pattern"; then
				date +%s%N >"$dir/end"
			fi
		done
		[ "$pattern" != end ] || date +%s%N >"$dir/end"
	}
	if [ ! -s "$dir/end" ] || grep -q '^start.sh: it has failed' "$dir/output"; then
		cat "$dir/output" >&2
		exit 1
	fi
	echo $(($(cat "$dir/end") - began)) | awk '{ printf "%.2f", $1 / 1e9 }'
	rm -f "$dir/end" "$dir/output"
}

for run in $(seq "${RUNS:-3}"); do
	export CUDA_CACHE_PATH="$dir/$run"
	mkdir "$CUDA_CACHE_PATH"
	empty=$(measure "$@")
	filled=$(measure "$@")
	echo "empty=$empty filled=$filled cached=$(find "$CUDA_CACHE_PATH" -type f |
		xargs -r cat | wc -c)"
done
