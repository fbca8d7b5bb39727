//go:build amd64 || arm64

package host

import "unsafe"

// pause tells the processor that this is a spin loop.
func pause()

// fetchToWrite tells the processor that nbytes bytes at p, the start of a cache line, are about to
// be written.
//
//go:noescape
func fetchToWrite(p unsafe.Pointer, nbytes int)

// fetchToRead tells the processor that the cache line at p is about to be read.
//
//go:noescape
func fetchToRead(p unsafe.Pointer)
