package fakedevice

import "golang.org/x/sys/unix"

// noReserve says that addresses do not count as memory.
const noReserve = unix.MAP_NORESERVE
