// Package proof proves that a plan computes its program, whatever has made it.
//
// It knows plans by the types of package plan and uses none of its functions that decide anything,
// which a test of internal/repolint keeps: so a mistake of planning cannot hide itself. Which sums
// each kind of run leaves it takes from the program, as it takes the program's other operations:
// tests of package plan prove these (TestAccumulationIsASum, TestRunsOfARankMakeItsBranches and
// TestAStepIsItsDefinition).
//
//   - verify.go: a run of the plan on paper, each kind of run
//   - values.go, numbers.go: what is in memory in place of elements: value numbers
//   - verifyupdates.go: what runs must leave
//   - exchanges.go: what leaves in buckets, and what comes back
//   - passes.go: how a loop really runs, pass by pass, and what may run inside of a product
//   - overlap.go: which memory is another's, for steps that run at one time
//   - read.go: what the types say
package proof
