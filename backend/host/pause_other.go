//go:build !amd64 && !arm64

package host

func pause() {}
