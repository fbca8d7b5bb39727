package backendtest

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// patient is the timeout of groups that are not tested for theirs.
const patient = 30 * time.Second

// scenario is one promise of the contract.
type scenario struct {
	name    string // the sentence it proves
	atLeast int    // the smallest group that it is about
	run     func(s *suite, P int) error
	values  bool // it says more without the race detector, which leaves values out
}

// scenarios is the whole suite.
var scenarios = []scenario{
	{"ResultsEqualReference", 1, (*suite).results, true},
	{"LargeResultsEqualReference", 1, (*suite).largeResults, true},
	{"RoundingIsBounded", 1, (*suite).rounding, true},
	{"AlgorithmsGiveTheSameBits", 1, (*suite).algorithms, true},
	{"WhoHasNothingTakesPart", 1, (*suite).nothing, false},
	{"SumsInATree", 1, (*suite).tree, true},
	{"SumsOfBranches", 1, (*suite).branches, true},
	{"PiecesArePermuted", 1, (*suite).rows, true},
	{"PartGivesTheBitsOfTheWhole", 1, (*suite).reducePart, true},
	{"AverageDoesNotOverflow", 1, (*suite).average, true},
	{"RanksGetTheSameBits", 2, (*suite).sameBits, true},
	{"BackToBackCallsDoNotMix", 1, (*suite).backToBack, false},
	{"MemoryIsFreeOnceWorkIsDone", 1, (*suite).reuse, false},
	{"NothingGrows", 1, (*suite).growth, false},
	{"AllocGivesZeroedMemory", 1, (*suite).alloc, false},
	{"FreedMemoryIsGivenBack", 1, (*suite).freed, false},
	{"BarrierWaitsForEveryRank", 1, (*suite).barrier, false},
	{"AgreedOrderAmongGoroutinesIsEnough", 1, (*suite).goroutines, false},
	{"StartOnQueueReturnsAtOnce", 2, (*suite).startReturns, false},
	{"WorkOrdersAnotherQueue", 1, (*suite).workOrders, false},
	{"CallsKeepTheirOrderAcrossQueues", 1, (*suite).acrossQueues, false},
	{"CallsOfAllKindsKeepTheirOrderAcrossQueues", 1, (*suite).mixedAcrossQueues, false},
	{"ManyWorksInFlight", 1, (*suite).inFlight, false},
	{"KernelsAndCollectivesShareAQueue", 1, (*suite).sharedQueue, false},
	{"JoinEndsWithItsContext", 2, (*suite).joinContext, false},
	{"SplitMakesGroups", 1, (*suite).split, true},
	{"PartsOutliveNothingElse", 2, (*suite).partsClose, false},
	{"ErrorsOfPartsNameTheJobsRanks", 2, (*suite).partsName, false},
	{"OverlappingGroupsRunTogether", 3, (*suite).overlapping, true},
	{"ArgumentErrorsLeaveItUsable", 1, (*suite).arguments, false},
	{"MismatchNamesBothSides", 2, (*suite).mismatch, false},
	{"MismatchOnAQueueEndsEveryRank", 2, (*suite).mismatchOnQueue, false},
	{"TheMinorityIsToBlameOnEveryRank", 2, (*suite).blame, true},
	{"AbortWakesPeers", 2, (*suite).abort, false},
	{"AbortEndsWorkOnAQueue", 2, (*suite).abortQueued, false},
	{"APanicInACallEndsEveryRank", 2, (*suite).panics, false},
	{"CloseWakesPeers", 2, (*suite).closeWakes, false},
	{"CloseEndsOwnCall", 2, (*suite).closeOwn, false},
	{"CallsAfterCloseFail", 1, (*suite).afterClose, false},
	{"TimeoutNamesTheMissing", 2, (*suite).timeout, false},
	{"LostRankWakesPeers", 2, (*suite).lost, false},
}

// suite is Options and how much to do.
type suite struct {
	Options
	full  bool          // the full product, not a sample of it
	limit time.Duration // how long the ranks of a scenario may take together

	notes  notes // see tell
	groups int   // how many were made
}

func newSuite(o Options) *suite {
	s := &suite{Options: o, full: env.Full.Set(os.Getenv), limit: limit,
		notes: rendezvous.NewMemStore()}
	s.Integers = cmp.Or(s.Integers, backend.I64)
	if s.Unsupported == nil {
		s.Unsupported = func(backend.Kind, backend.DType, backend.ReduceOp) bool { return false }
	}
	if s.Sizes == nil {
		s.Sizes = []int{1, 2, 3, 8}
		if s.full {
			s.Sizes = []int{1, 2, 3, 4, 5, 6, 7, 8, 9}
		}
	}
	return s
}

// Run tests the communicators that o makes. Do not run it in parallel with
// other tests: it looks for goroutines that were left behind.
func Run(t *testing.T, o Options) { newSuite(o).run(t, scenarios) }

func (s *suite) run(t *testing.T, list []scenario) {
	leg := os.Getenv("SUITE")
	require.That(t, slices.Contains([]string{"", "raced", "unraced"}, leg),
		"SUITE=%s: use raced or unraced, or unset it for the whole suite", leg)
	unraced := leg == "unraced" && !strings.Contains(t.Name(), "Unraced")
	for _, P := range s.Sizes {
		raced := s.raced(P)
		if leg == "raced" && !raced {
			continue
		}
		t.Run(fmt.Sprintf("P=%d", P), func(t *testing.T) {
			for _, c := range list {
				if P >= c.atLeast && (c.values || !unraced || !raced && P < 8) {
					t.Run(c.name, func(t *testing.T) { report(t, s.try(c, P)) })
				}
			}
		})
	}
}

// raced reports whether make race (SUITE=raced) runs groups of P: of 3 and 4, and of 2 where there
// are no others. What it has run, make unraced (SUITE=unraced) leaves out of them, and out of those
// of 8, except what depends on values; tests named Unraced are not raced, and run whole.
func (s *suite) raced(P int) bool {
	return P == 3 || P == 4 || P == 2 && !slices.Contains(s.Sizes, 3) &&
		!slices.Contains(s.Sizes, 4)
}

// errSkip is the reason why a scenario says nothing about an implementation.
type errSkip string

func (e errSkip) Error() string { return string(e) }

func report(t *testing.T, err error) {
	t.Helper()
	var skip errSkip
	if errors.As(err, &skip) {
		t.Skip(skip)
	}
	require.Report(t, err)
}

// try runs a scenario and looks for goroutines that it left behind.
func (s *suite) try(c scenario, P int) error {
	before := goleak.IgnoreCurrent()
	err := c.run(s, P)
	if err != nil {
		return err // a stuck rank is no leak
	}
	if err := goleak.Find(before); err != nil {
		return fmt.Errorf("goroutines were left behind after Close: %w", err)
	}
	return nil
}

// with runs f on a fresh group and closes it.
func (s *suite) with(P int, timeout time.Duration, f func(g *Group) error) error {
	s.groups++
	g, err := s.New(P, timeout)
	if err != nil {
		return fmt.Errorf("cannot make a group of %d ranks: %w", P, err)
	}
	err = f(g)
	err = errors.Join(err, closeAll(g.Comms))
	if g.Close != nil {
		err = errors.Join(err, g.Close())
	}
	return err
}

// closeAll closes all ranks at once, as the ranks of a program do: some backends
// take longer if one closes alone.
func closeAll(comms []backend.Communicator) error {
	if err := testranks.All(len(comms), func(r int) error { return comms[r].Close() }); err != nil {
		return fmt.Errorf("at Close: %w", err)
	}
	return nil
}

// ranks runs f on every rank of a fresh group.
func (s *suite) ranks(P int, f func(c backend.Communicator) error) error {
	return s.with(P, patient, func(g *Group) error { return s.each(g.Comms, f) })
}

// times returns how often to repeat what is repeated n times in a full run.
func (s *suite) times(n int) int {
	if s.full {
		return n
	}
	return max(n/25, 10)
}
