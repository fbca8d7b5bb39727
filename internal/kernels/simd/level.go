package simd

// Level is a set of vector instructions. A higher level includes those below it.
type Level int

// The levels.
const (
	Go     Level = iota // plain loops
	AVX2                // AVX2, FMA and F16C: 256 bits
	AVX512              // AVX-512 F, BW, DQ and VL: 512 bits
)

// String implements [fmt.Stringer].
func (l Level) String() string { return [...]string{"Go", "AVX2", "AVX-512"}[l] }

// Levels returns those that this processor and its operating system have, the best one last.
func Levels() []Level { return []Level{Go, AVX2, AVX512}[:Best()+1] }
