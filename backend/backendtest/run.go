package backendtest

import (
	"cmp"
	"errors"
	"fmt"
	"os"
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
}

// scenarios is the whole suite.
var scenarios = []scenario{
	{"ResultsEqualReference", 1, (*suite).results},
	{"LargeResultsEqualReference", 1, (*suite).largeResults},
	{"RoundingIsBounded", 1, (*suite).rounding},
	{"AlgorithmsGiveTheSameBits", 1, (*suite).algorithms},
	{"WhoHasNothingTakesPart", 1, (*suite).nothing},
	{"SumsInATree", 1, (*suite).tree},
	{"SumsOfBranches", 1, (*suite).branches},
	{"PiecesArePermuted", 1, (*suite).rows},
	{"PartGivesTheBitsOfTheWhole", 1, (*suite).reducePart},
	{"AverageDoesNotOverflow", 1, (*suite).average},
	{"RanksGetTheSameBits", 2, (*suite).sameBits},
	{"BackToBackCallsDoNotMix", 1, (*suite).backToBack},
	{"MemoryIsFreeOnceWorkIsDone", 1, (*suite).reuse},
	{"NothingGrows", 1, (*suite).growth},
	{"AllocGivesZeroedMemory", 1, (*suite).alloc},
	{"FreedMemoryIsGivenBack", 1, (*suite).freed},
	{"BarrierWaitsForEveryRank", 1, (*suite).barrier},
	{"AgreedOrderAmongGoroutinesIsEnough", 1, (*suite).goroutines},
	{"StartOnQueueReturnsAtOnce", 2, (*suite).startReturns},
	{"WorkOrdersAnotherQueue", 1, (*suite).workOrders},
	{"CallsKeepTheirOrderAcrossQueues", 1, (*suite).acrossQueues},
	{"CallsOfAllKindsKeepTheirOrderAcrossQueues", 1, (*suite).mixedAcrossQueues},
	{"ManyWorksInFlight", 1, (*suite).inFlight},
	{"KernelsAndCollectivesShareAQueue", 1, (*suite).sharedQueue},
	{"JoinEndsWithItsContext", 2, (*suite).joinContext},
	{"SplitMakesGroups", 1, (*suite).split},
	{"PartsOutliveNothingElse", 2, (*suite).partsClose},
	{"ErrorsOfPartsNameTheJobsRanks", 2, (*suite).partsName},
	{"OverlappingGroupsRunTogether", 3, (*suite).overlapping},
	{"ArgumentErrorsLeaveItUsable", 1, (*suite).arguments},
	{"MismatchNamesBothSides", 2, (*suite).mismatch},
	{"MismatchOnAQueueEndsEveryRank", 2, (*suite).mismatchOnQueue},
	{"TheMinorityIsToBlameOnEveryRank", 2, (*suite).blame},
	{"AbortWakesPeers", 2, (*suite).abort},
	{"AbortEndsWorkOnAQueue", 2, (*suite).abortQueued},
	{"APanicInACallEndsEveryRank", 2, (*suite).panics},
	{"CloseWakesPeers", 2, (*suite).closeWakes},
	{"CloseEndsOwnCall", 2, (*suite).closeOwn},
	{"CallsAfterCloseFail", 1, (*suite).afterClose},
	{"TimeoutNamesTheMissing", 2, (*suite).timeout},
	{"LostRankWakesPeers", 2, (*suite).lost},
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
	for _, P := range s.Sizes {
		t.Run(fmt.Sprintf("P=%d", P), func(t *testing.T) {
			for _, c := range list {
				if P >= c.atLeast {
					t.Run(c.name, func(t *testing.T) { report(t, s.try(c, P)) })
				}
			}
		})
	}
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
