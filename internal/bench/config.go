package bench

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// The bounds of an adaptive number of timed calls.
const (
	MinIters = 20
	MaxIters = 20000
)

// Config says what to measure. It must be the same on every rank.
type Config struct {
	// Collective is the call: kind, op, root and algorithm. Splits and State must
	// not be set.
	Collective backend.Collective
	DType      backend.DType
	// Min and Max are the first and the largest size, in bytes; each size is
	// Factor times the one before.
	Min, Max Size
	Factor   int
	// Iters is how many calls to time; 0 chooses by Budget.
	Iters int
	// Budget is how long the timed calls of one size should take.
	Budget time.Duration
	// Alloc puts the buffers into the communicator's own memory (Alloc).
	Alloc bool
	// InPlace uses the same memory for source and destination.
	InPlace bool
}

// Check returns an error if P ranks cannot measure this.
func (c Config) Check(P int) error {
	k := c.Collective
	switch {
	case !k.Kind.Valid():
		return fmt.Errorf("bench: unknown collective %v: use one of %v", k.Kind, backend.Kinds())
	case k.Kind.Reduces() && !k.Op.Valid():
		return fmt.Errorf("bench: unknown reduction %v: use one of %v", k.Op, backend.ReduceOps())
	case k.Kind.Rooted() && (k.Root < 0 || k.Root >= P):
		return fmt.Errorf("bench: root %d is out of range: there are %d ranks, 0 to %d", k.Root,
			P, P-1)
	case k.Splits != nil || k.State != 0:
		return fmt.Errorf("bench: only even chunks are measured, and no state")
	case !c.DType.Valid():
		return fmt.Errorf("bench: unknown dtype %v: use one of %v", c.DType, backend.DTypes())
	case c.Min < 1:
		return fmt.Errorf("bench: the smallest size is %d bytes: it must be at least 1", c.Min)
	case c.Max < c.Min:
		return fmt.Errorf("bench: the largest size, %v, is below the smallest, %v", c.Max, c.Min)
	case c.Factor < 2:
		return fmt.Errorf("bench: sizes grow by a factor of %d: it must be at least 2", c.Factor)
	case c.Iters < 0 || c.Iters > MaxIters:
		return fmt.Errorf("bench: %d timed calls: it must be 1 to %d, or 0 to choose by time",
			c.Iters, MaxIters)
	case c.Iters == 0 && c.Budget <= 0:
		return fmt.Errorf("bench: a time of %v for each size: it must be positive", c.Budget)
	case c.InPlace && k.Kind == backend.AllToAll && P > 1:
		return fmt.Errorf("bench: %v cannot be in place", k.Kind)
	}
	return nil
}

// counts returns the count of the call for each size, see
// [backend.Collective.Check].
func (c Config) counts(P int) []int {
	per := c.DType.Size()
	if chunked(c.Collective.Kind) {
		per *= P
	}
	var counts []int
	for size := int(c.Min); ; size *= c.Factor {
		n := max(1, size/per)
		if len(counts) == 0 || counts[len(counts)-1] != n {
			counts = append(counts, n)
		}
		if size > int(c.Max)/c.Factor {
			return counts
		}
	}
}

// chunked reports whether one buffer of the kind holds a chunk for each rank.
func chunked(k backend.Kind) bool {
	return k != backend.AllReduce && k != backend.Reduce && k != backend.Broadcast
}

// lengths returns the elements of the source and the destination of rank r,
// for a call of n elements: of a chunk, or of everything if the kind has no
// chunks. 0 stands for a buffer that the rank does not pass.
func lengths(c backend.Collective, r, P, n int) (src, dst int) {
	switch c.Kind {
	case backend.ReduceScatter, backend.Scatter:
		src, dst = P*n, n
	case backend.AllGather, backend.Gather:
		src, dst = n, P*n
	case backend.AllToAll:
		src, dst = P*n, P*n
	default:
		src, dst = n, n
	}
	if r != c.Root {
		switch c.Kind {
		case backend.Broadcast, backend.Scatter:
			src = 0
		case backend.Reduce, backend.Gather:
			dst = 0
		}
	}
	return src, dst
}

// Size is a number of bytes that reads and prints as "64K".
type Size int

var units = []struct {
	name  string
	bytes Size
}{{"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}}

// String returns the size in the largest unit that divides it.
func (s Size) String() string {
	for _, u := range units {
		if s >= u.bytes && s%u.bytes == 0 {
			return strconv.Itoa(int(s/u.bytes)) + u.name
		}
	}
	return strconv.Itoa(int(s))
}

// UnmarshalText reads "1000", "64K", "64KiB" or "1G"; units are powers of two.
func (s *Size) UnmarshalText(text []byte) error {
	digits := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(string(text)), "B"), "I")
	unit := Size(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(digits, u.name); ok {
			digits, unit = rest, u.bytes
			break
		}
	}
	n, err := strconv.Atoi(digits)
	if err != nil || n < 0 || n > math.MaxInt/int(unit) {
		return fmt.Errorf("%q is not a size: write a number of bytes, or one with K, M or G "+
			"(powers of two)", text)
	}
	*s = Size(n) * unit
	return nil
}
