//go:build !amd64 && !arm64

package host

import "unsafe"

func pause() {}

func fetchToWrite(unsafe.Pointer, int) {}

func fetchToRead(unsafe.Pointer) {}
