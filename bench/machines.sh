#!/bin/sh
# machines.sh EURYALE RATE ARGS...: runs EURYALE bench ARGS on two machines of two ranks, which are
# network namespaces of this one with boot IDs of their own; what each sends the other is limited to
# RATE, in tc's words, or not if RATE is "none". It takes root, iproute2 and util-linux.
#
#	EURYALE_HIERARCHY=never sh bench/machines.sh bin/euryale 2150mbit --backend tcp --min 64M
set -e
euryale=$1 rate=$2
shift 2
one=eu$$a two=eu$$b dir=$(mktemp -d)
trap 'ip netns delete $one || true; ip netns delete $two || true; rm -r "$dir"' EXIT
ip netns add $one
ip netns add $two
ip -n $one link add eth0 type veth peer name eth0 netns $two
ip -n $one address add 10.213.78.1/24 dev eth0
ip -n $two address add 10.213.78.2/24 dev eth0
for n in $one $two; do
	ip -n $n link set lo up
	ip -n $n link set eth0 up
	test "$rate" = none ||
		tc -n $n qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 50ms
	echo $n > "$dir/$n"
done
export EURYALE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
machine() {
	n=$1 rank=$2
	shift 2
	ip netns exec $n unshare --mount sh -c '
		mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"' "$dir/$n" \
		"$euryale" run --nnodes 2 --node-rank $rank --rendezvous 10.213.78.1:29500 -n 2 \
		"$euryale" bench "$@"
}
machine $two 1 "$@" &
machine $one 0 "$@"
wait $!
