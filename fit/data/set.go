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

// Set is samples: a fit.Set.
type Set interface {
	Len() int
	Read(sample int, row []any) error
}

type set struct {
	n    int
	read func(sample int, row []any) error
}

func (s set) Len() int { return s.n }

func (s set) Read(sample int, row []any) error {
	if err := backend.Given("data.Of", "read", s.read); err != nil {
		return err
	}
	if sample < 0 || sample >= s.n {
		return fmt.Errorf("%w: data: sample %d of %d", backend.ErrArgument, sample, s.n)
	}
	return s.read(sample, row)
}

// Of returns n samples that a function reads, which several goroutines call at once.
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

// Tensors returns the rows of contiguous tensors, which have the same first axis: input k gets
// those of tensor k, of Float32, Float64 or Int.
func Tensors(columns ...*tensor.Dense) (Set, error) {
	if err := backend.Given("data.Tensors", "columns", columns); err != nil {
		return nil, err
	}
	n := 0
	for k, c := range columns {
		if c.Dims() == 0 || k > 0 && c.Shape()[0] != n || c.RequiresIterator() {
			return nil, fmt.Errorf("%w: data.Tensors: tensor %d is %v: all must be contiguous, with "+
				"the same first axis", backend.ErrArgument, k, c.Shape())
		}
		n = c.Shape()[0]
	}
	return Of(n, func(i int, row []any) (err error) {
		for k := 0; k < len(columns) && err == nil; k++ {
			size := columns[k].Shape().TotalSize() / n
			switch from := columns[k].Data().(type) {
			case []float32:
				err = put(row, k, from[i*size:(i+1)*size], 1)
			case []float64:
				err = put(row, k, from[i*size:(i+1)*size], 1)
			case []int:
				err = put(row, k, from[i*size:(i+1)*size], 1)
			}
		}
		return err
	}), nil
}

// put writes numbers, divided by another one, to an input of a row, if the graph has it.
func put[F byte | int | float32 | float64](row []any, input int, from []F, by float64) error {
	fits := true
	if input < len(row) {
		switch to := row[input].(type) {
		case []float32:
			fits = fill(to, from, by)
		case []float64:
			fits = fill(to, from, by)
		case []int:
			_, fits = any(from).([]int)
			fits = fits && fill(to, from, by)
		default:
			fits = false
		}
	}
	if !fits {
		return fmt.Errorf("%w: data: input %d takes another number of elements, or another type, "+
			"than the %d of %T that a sample has", backend.ErrArgument, input, len(from), from)
	}
	return nil
}

func fill[T int | float32 | float64, F byte | int | float32 | float64](to []T, from []F,
	by float64) bool {
	for i := range min(len(to), len(from)) {
		to[i] = T(float64(from[i]) / by)
	}
	return len(to) == len(from)
}

// limit is how many bytes a file may have, unpacked.
const limit = 4 << 30

// contents returns a file, unpacked if its name ends in .gz.
func contents(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	in := io.Reader(f)
	if strings.HasSuffix(path, ".gz") {
		if in, err = gzip.NewReader(f); err != nil {
			return nil, wrong(path, "%w", err)
		}
	}
	all, err := io.ReadAll(io.LimitReader(in, limit+1))
	if len(all) > limit {
		err = errors.New("it is too long")
	}
	if err != nil {
		return nil, wrong(path, "after %d bytes: %w", len(all), err)
	}
	return all, nil
}

// wrong is the error of a file that is not what it should be.
func wrong(path, format string, args ...any) error {
	return fmt.Errorf("data: %s: %w", path, fmt.Errorf(format, args...))
}
