package backendtest

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// wrapperScenarios are the promises that a wrapper can break although the communicator below
// it keeps them: it may start further calls, it closes what it wraps, and it passes errors on.
var wrapperScenarios = []string{
	"ResultsEqualReference",
	"WhoHasNothingTakesPart",
	"SumsInATree",
	"SumsOfBranches",
	"PiecesArePermuted",
	"MemoryIsFreeOnceWorkIsDone",
	"NothingGrows",
	"FreedMemoryIsGivenBack",
	"StartOnQueueReturnsAtOnce",
	"CallsOfAllKindsKeepTheirOrderAcrossQueues",
	"ManyWorksInFlight",
	"JoinEndsWithItsContext",
	"SplitMakesGroups",
	"ErrorsOfPartsNameTheJobsRanks",
	"ArgumentErrorsLeaveItUsable",
	"MismatchOnAQueueEndsEveryRank",
	"TheMinorityIsToBlameOnEveryRank",
	"AbortWakesPeers",
	"APanicInACallEndsEveryRank",
	"CloseEndsOwnCall",
	"CallsAfterCloseFail",
	"LostRankWakesPeers",
}

// RunWrapper is [Run] for a communicator that wraps one which passes Run itself: it leaves out
// what only the communicator below can break. EURYALE_FULL=1 runs everything.
func RunWrapper(t *testing.T, o Options) {
	s := newSuite(o)
	list := scenarios
	if !s.full {
		list = ofWrappers()
		require.That(t, len(list) == len(wrapperScenarios), "%d of wrapperScenarios are "+
			"scenarios, want %d: a name is wrong, or there twice", len(list), len(wrapperScenarios))
	}
	s.run(t, list)
}

// ofWrappers returns the wrapperScenarios, in the order of the suite.
func ofWrappers() []scenario {
	return slices.DeleteFunc(slices.Clone(scenarios), func(c scenario) bool {
		return !slices.Contains(wrapperScenarios, c.name)
	})
}
