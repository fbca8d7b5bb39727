// Package jobs has nothing but tests: of whole jobs, with ranks that are processes or goroutines of
// one, as users get them from package euryale.
package jobs
