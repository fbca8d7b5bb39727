//go:build race

package jobs_test // make race runs all of its tests
