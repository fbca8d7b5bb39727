//go:build race

package group_test // make race runs all of its tests
