//go:build unix && !linux

package fakedevice

// noReserve is nothing: addresses without rights do not count as memory.
const noReserve = 0
