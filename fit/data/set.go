package data

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
)

// Set is a set of samples: a fit.Set.
type Set interface {
	Len() int
	Read(sample int, row []any) error
}

type set struct {
	n       int
	read    func(sample int, row []any) error
	mapping Mapping
}

// Mapping is for [MappingOf].
func (s set) Mapping() Mapping { return s.mapping }

func (s set) Len() int { return s.n }

func (s set) Read(sample int, row []any) error {
	if sample < 0 || sample >= s.n {
		return fmt.Errorf("%w: data: sample %d of %d", backend.ErrArgument, sample, s.n)
	}
	return s.read(sample, row)
}

// Of returns a set of n samples that a function reads. Several goroutines call it at once.
func Of(n int, read func(sample int, row []any) error) Set {
	if err := backend.Given("data.Of", "read", read); err != nil {
		read = func(int, []any) error { return err }
	}
	return set{n, read, Mapping{}}
}

// Split divides samples at random: a part of them, from 0 to 1 such as 0.2, is held out. The same
// seed gives the same parts. With another part, Read of both sets is an error.
func Split(s Set, part float64, seed uint64) (rest, heldOut Set) {
	err := backend.Given("data.Split", "s", s)
	if err != nil {
		s = Of(1, func(int, []any) error { return err })
	}
	if err == nil && !(part >= 0 && part <= 1) {
		none := Of(s.Len(), func(int, []any) error {
			return fmt.Errorf("%w: data.Split: the part %v to hold out is not from 0 to 1",
				backend.ErrArgument, part)
		})
		return none, none
	}
	order := rand.New(rand.NewPCG(seed, 0)).Perm(s.Len())
	n := min(s.Len(), int(part*float64(s.Len())+0.5))
	pick := func(which []int) Set {
		read := func(i int, row []any) error { return s.Read(which[i], row) }
		return set{len(which), read, MappingOf(s)}
	}
	return pick(order[n:]), pick(order[:n])
}

// Tensors returns a set of the rows of tensors: input k gets the rows of tensor k.
//
// Errors: [backend.ErrArgument] for tensors of other types than Float32, Float64 and Int, for views
// and tensors in column-major order, and for different first axes.
func Tensors(columns ...*tensor.Dense) (Set, error) {
	if err := backend.Given("data.Tensors", "columns", columns); err != nil {
		return nil, err
	}
	n, all := 0, make([]any, len(columns))
	for k, c := range columns {
		if c.Dims() == 0 || k > 0 && c.Shape()[0] != n || c.RequiresIterator() ||
			c.DataOrder().IsColMajor() {
			return nil, fmt.Errorf("%w: data.Tensors: tensor %d is %v: all must be contiguous, in "+
				"row-major order, with the same first axis", backend.ErrArgument, k, c.Shape())
		}
		if d := c.Dtype(); d != tensor.Float32 && d != tensor.Float64 && d != tensor.Int {
			return nil, fmt.Errorf("%w: data.Tensors: tensor %d is of %v: give Float32, Float64 "+
				"or Int", backend.ErrArgument, k, d)
		}
		n, all[k] = c.Shape()[0], c.Data()
	}
	return table(n, all...), nil
}

// table returns n samples of columns, which have the elements of one after the other. Bytes are
// pixels: 255 is 1.
func table(n int, columns ...any) Set {
	return Of(n, func(i int, row []any) error {
		if len(row) > len(columns) {
			return fmt.Errorf("%w: data: there are %d inputs, and a sample has values for %d",
				backend.ErrArgument, len(row), len(columns))
		}
		for k := range row {
			var fits error
			switch c := columns[k].(type) {
			case []byte:
				fits = put(row[k], c[i*len(c)/n:(i+1)*len(c)/n], 255)
			case []int:
				fits = put(row[k], c[i*len(c)/n:(i+1)*len(c)/n], 1)
			case []float32:
				fits = put(row[k], c[i*len(c)/n:(i+1)*len(c)/n], 1)
			case []float64:
				fits = put(row[k], c[i*len(c)/n:(i+1)*len(c)/n], 1)
			}
			if fits != nil {
				return fmt.Errorf("%w: data: input %d, of a sample's %T: %w", backend.ErrArgument,
					k, columns[k], fits)
			}
		}
		return nil
	})
}

// put writes numbers, divided by another one, to an input that takes them.
func put[F byte | int | float32 | float64](input any, from []F, by float64) error {
	switch to := input.(type) {
	case []float32:
		return fill(to, from, by)
	case []float64:
		return fill(to, from, by)
	case []int:
		if _, whole := any(from).([]int); whole {
			return fill(to, from, by)
		}
	}
	return fmt.Errorf("a %T takes another type", input)
}

// fill refuses integers that the input would round to others. Those of 2^63 on are not counts or
// names any more, and are rounded as fractions are.
func fill[T int | float32 | float64, F byte | int | float32 | float64](to []T, from []F,
	by float64) error {
	if len(to) != len(from) {
		return fmt.Errorf("it takes %d elements, and not %d", len(to), len(from))
	}
	if same, ok := any(from).([]T); ok && by == 1 {
		copy(to, same)
		return nil
	}
	for i, x := range from {
		if by == 1 { // with no detour by float64, which does not hold all integers
			to[i] = T(x)
		} else {
			to[i] = T(float64(x) / by)
			continue
		}
		whole := math.Trunc(float64(x)) == float64(x) && math.Abs(float64(x)) < 1<<63
		if whole && F(to[i]) != x || math.IsInf(float64(to[i]), 0) && !math.IsInf(float64(x), 0) {
			return fmt.Errorf("a %T does not hold %.0f: use Float64, or smaller numbers", to[i],
				float64(x))
		}
	}
	return nil
}

// Source opens the URLs of files that are not on a disk:
//
//	samples, classes, err := data.Source(bucket.Open).CSV("s3://bucket/iris.csv", "species")
type Source func(url string) (fs.FS, error)

func (s Source) at(path string) (files.Dir, error) {
	if s == nil {
		return files.At(path)
	}
	return files.At(path, files.Opener(s))
}

// limit is the most bytes that a file may have, unpacked.
const limit = 4 << 30

// contents returns a file, unpacked if its name ends in .gz.
func (s Source) contents(path string) ([]byte, error) {
	at, err := s.at(path)
	if err != nil {
		return nil, err
	}
	f, err := at.Open(".")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	in := io.Reader(f)
	if strings.HasSuffix(path, ".gz") {
		in, err = gzip.NewReader(f)
	}
	if err != nil {
		return nil, wrong(path, "%w", err)
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
