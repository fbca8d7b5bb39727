//go:build amd64 || arm64

package observe

// count reads the time stamp counter, or the system counter.
func count() int64
