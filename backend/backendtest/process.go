package backendtest

import (
	"errors"
	"fmt"
	"slices"
)

// inOneProcess are the scenarios whose ranks see in memory what the others do.
var inOneProcess = []string{
	"RanksGetTheSameBits",
	"BarrierWaitsForEveryRank",
	"StartOnQueueReturnsAtOnce",
	"JoinEndsWithItsContext",
	"AbortWakesPeers",
	"AbortEndsWorkOnAQueue",
	"CloseWakesPeers",
	"CloseEndsOwnCall",
	"TimeoutNamesTheMissing",
	"LostRankWakesPeers",
}

// RunRank is [Run] for one rank of a job of size processes, each of which calls it with the same
// options. Their New gives a Group of the rank's own communicator alone. Scenarios whose ranks see in
// memory what the others do are left out. RunRank returns the first failure: a process that ends with
// it ends the others, which would wait for it.
func RunRank(o Options, size int) error {
	s := newSuite(o)
	for _, c := range scenarios {
		if size < c.atLeast || slices.Contains(inOneProcess, c.name) {
			continue
		}
		if err := s.try(c, size); err != nil && !errors.As(err, new(errSkip)) {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}
