package data

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Set is samples: a [fit.Set].
//
// [fit.Set]: https://pkg.go.dev/github.com/euryale-ml/euryale/fit#Set
type Set interface {
	Len() int
	Read(sample int, row []any) error
}

// set is samples that a function reads.
type set struct {
	n    int
	read func(sample int, row []any) error
}

func (s set) Len() int { return s.n }

func (s set) Read(sample int, row []any) error {
	if sample < 0 || sample >= s.n {
		return fmt.Errorf("%w: data: sample %d of %d", backend.ErrArgument, sample, s.n)
	}
	if err := backend.Given("data.Of", "read", s.read); err != nil {
		return err
	}
	return s.read(sample, row)
}

// Of returns n samples that a function reads.
func Of(n int, read func(sample int, row []any) error) Set { return set{n, read} }

// Split divides samples at random: a part of them, such as 0.2, is held out. The same seed gives
// the same parts.
func Split(s Set, part float64, seed uint64) (rest, heldOut Set) {
	if err := backend.Given("data.Split", "s", s); err != nil { // which Read reports
		s = Of(1, func(int, []any) error { return err })
	}
	order := rand.New(rand.NewPCG(seed, 0)).Perm(s.Len())
	n := min(s.Len(), max(0, int(part*float64(s.Len())+0.5)))
	pick := func(which []int) Set {
		return Of(len(which), func(i int, row []any) error { return s.Read(which[i], row) })
	}
	return pick(order[n:]), pick(order[:n])
}

// Tensors returns the rows of tensors, which have the same first axis: input k gets those of tensor
// k.
//
// Errors: ErrArgument for tensors without an axis, or of different lengths.
func Tensors(columns ...*tensor.Dense) (Set, error) {
	if err := backend.Given("data.Tensors", "columns", columns); err != nil {
		return nil, err
	}
	n := 0
	for k, c := range columns {
		if c.Dims() == 0 || k > 0 && c.Shape()[0] != n || c.RequiresIterator() {
			return nil, fmt.Errorf("%w: data.Tensors: tensor %d has the shape %v: all must be "+
				"contiguous, with the same first axis", backend.ErrArgument, k, c.Shape())
		}
		n = c.Shape()[0]
	}
	return Of(n, func(i int, row []any) error {
		for k := range min(len(columns), len(row)) {
			size := columns[k].Shape().TotalSize() / n
			if err := write(row, k, columns[k].Data(), i*size, size); err != nil {
				return err
			}
		}
		return nil
	}), nil
}

// write copies elements of from to input k of a row. Floats become those of the input.
func write(row []any, k int, from any, at, n int) error {
	if k >= len(row) {
		return nil // the graph has no such input
	}
	fits := false
	switch to := row[k].(type) {
	case []float32:
		switch from := from.(type) {
		case []float32:
			fits = copy(to, from[at:at+n]) == n && len(to) == n
		case []float64:
			fits = convert(to, from[at:at+n], 1)
		}
	case []float64:
		switch from := from.(type) {
		case []float32:
			fits = convert(to, from[at:at+n], 1)
		case []float64:
			fits = copy(to, from[at:at+n]) == n && len(to) == n
		}
	case []int:
		if from, ok := from.([]int); ok {
			fits = copy(to, from[at:at+n]) == n && len(to) == n
		}
	}
	if !fits {
		return fmt.Errorf("%w: data: input %d takes a %T, and a sample has %d elements of a %T",
			backend.ErrArgument, k, row[k], n, from)
	}
	return nil
}

// pixels writes bytes as numbers from 0 to 1, and a class behind them.
func pixels(row []any, image []byte, class int) error {
	fits := false
	switch to := row[0].(type) {
	case []float32:
		fits = convert(to, image, 255)
	case []float64:
		fits = convert(to, image, 255)
	}
	if !fits {
		return fmt.Errorf("%w: data: input 0 takes a %T, and an image has %d pixels in all channels",
			backend.ErrArgument, row[0], len(image))
	}
	return write(row, 1, []int{class}, 0, 1)
}

func convert[T float32 | float64, F byte | float32 | float64](to []T, from []F, by T) bool {
	for i := range min(len(to), len(from)) {
		to[i] = T(from[i]) / by
	}
	return len(to) == len(from)
}

// limit is how many bytes a packed file may unpack to.
const limit = 4 << 30

// contents returns a file, unpacked if its name ends in .gz.
func contents(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if !strings.HasSuffix(path, ".gz") {
		return io.ReadAll(f)
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	all, err := io.ReadAll(io.LimitReader(z, limit+1))
	if len(all) > limit {
		err = errors.New("it unpacks to more than 4 GiB")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: after %d bytes: %w", path, len(all), err)
	}
	return all, nil
}

// wrong is the error of a file that is not what it should be.
func wrong(path, format string, args ...any) error {
	return fmt.Errorf("data: %s: %w", path, fmt.Errorf(format, args...))
}
