#!/bin/sh
# Two machines of two ranks each. Run on both, with the same EURYALE_TOKEN (from: euryale token):
#
#	sh two-machines.sh 0 10.99.0.1:29500 ./digits     # on machine 0, whose address this is
#	sh two-machines.sh 1 10.99.0.1:29500 ./digits     # on machine 1
set -eu
: "${EURYALE_TOKEN:?is not set: give both machines the same secret of at least 16 characters}"
machine=$1 rendezvous=$2
shift 2
exec euryale run --nnodes 2 --node-rank "$machine" --rendezvous "$rendezvous" -n "${RANKS:-2}" "$@"
