//go:build race

package fakedevice // make race runs all of its tests
