// Package fusetest makes random programs of package fuse, and says what they must compute: an
// interpreter goes through each element by itself and calls package math, without blocks,
// layouts or kernels. It also bounds the error that a device may make whose rounded functions
// are right up to four units in the last place.
package fusetest
