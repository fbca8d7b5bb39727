package autograd

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// parts are what the ranks of a communicator have of the parameters that they shard. Methods may
// be called on nil: nothing is sharded.
type parts struct {
	comm backend.Communicator
	axes map[string]int
	// of the ranks' parts along the axis, by parameter; nil for one that is not sharded
	lengths [][]int
}

// hasPart reports whether ranks have parts of a parameter.
func (s *parts) hasPart(p *param) bool {
	if s == nil {
		return false
	}
	_, divided := s.axes[p.name]
	return divided
}

// unlessOne returns nil where one rank has all parts.
func (s *parts) unlessOne() *parts {
	if s != nil && s.comm.Size() == 1 {
		return nil
	}
	return s
}

// connect finds what the ranks have, or returns an error on all of them if one has a problem.
func (s *parts) connect(params []*param, problem error) error {
	if s == nil {
		return problem
	}
	var text strings.Builder
	if problem == nil {
		problem = s.describe(&text, params)
	}
	labelled := backend.Label(s.comm, backend.ForNew)
	if err := agreeOnParams(labelled, text.String(), params, problem); err != nil {
		return err
	}
	var note []byte
	for _, p := range params {
		if axis, divided := s.axes[p.name]; divided {
			note = binary.LittleEndian.AppendUint64(note, uint64(p.shape[axis]))
		}
	}
	s.lengths = make([][]int, len(params))
	if note == nil {
		return nil
	}
	notes, err := group.OverComm(s.comm)(note)
	if err != nil {
		return err
	}
	at := 0
	for i, p := range params {
		if _, divided := s.axes[p.name]; !divided {
			continue
		}
		for _, note := range notes {
			s.lengths[i] = append(s.lengths[i], int(binary.LittleEndian.Uint64(note[at:])))
		}
		at += 8
	}
	return nil
}

// describe writes what the ranks must have in common, or returns why the parameters cannot be
// parts.
func (s *parts) describe(text *strings.Builder, params []*param) error {
	found := map[string]bool{}
	for _, p := range params {
		axis, divided := s.axes[p.name]
		dims := p.dims()
		if divided {
			if axis < 0 || axis >= len(dims) || found[p.name] {
				return fmt.Errorf("WithParts: %w: axis %d of parameter %v: it must be one of its "+
					"axes, and the name that of one parameter", backend.ErrArgument, axis, p)
			}
			dims = slices.Delete(dims, axis, axis+1)
		}
		found[p.name] = true
		fmt.Fprintf(text, "parameter %s is %v%v, sharded along an axis: %v (%d)\n", p.name, p.dtype,
			dims, divided, axis)
	}
	for _, name := range slices.Sorted(maps.Keys(s.axes)) {
		if !found[name] {
			return fmt.Errorf("WithParts: %w: there is no parameter %q", backend.ErrArgument, name)
		}
	}
	return nil
}

// first reports whether this rank does the work that one rank does for all parts.
func (s *parts) first() bool { return s == nil || s.comm.Rank() == 0 }

// size returns how many ranks have parts.
func (s *parts) size() int {
	if s == nil {
		return 1
	}
	return s.comm.Size()
}

// isPart reports whether a parameter is a part.
func (s *parts) isPart(param int) bool { return s != nil && s.lengths[param] != nil }

// join returns the whole of this rank's part of a parameter, or of what belongs to it element by
// element. It is collective.
func (s *parts) join(p *param, mine backend.Buffer) (stored, error) {
	regions := make([]checkpoint.Region, s.comm.Size())
	for r := range regions {
		regions[r] = s.regionOf(p, r)
	}
	whole, err := joinRegions(s.comm, p.dtype, regions, mine)
	return stored{Shape: regions[0].Shape, Data: whole}, err
}

// joinRegions returns the whole tensor of which the ranks have these regions. Ranks send the same
// number of bytes.
func joinRegions(comm backend.Communicator, d backend.DType, regions []checkpoint.Region,
	mine backend.Buffer) (backend.Buffer, error) {
	most, size := 0, d.Size()
	for _, r := range regions {
		most = max(most, r.N)
	}
	note := make([]byte, most*size)
	copy(note, mine.Bytes())
	notes, err := group.OverComm(comm)(note)
	if err != nil {
		return backend.Buffer{}, err
	}
	all := checkpoint.All(regions[0].Shape)
	whole := residence.Zeros(d, all.N)
	for r, note := range notes {
		regions[r].Meet(all, func(from, to, n int) {
			copy(whole.Bytes()[to*size:(to+n)*size], note[from*size:])
		})
	}
	return whole, nil
}

// regionOf returns what a rank has of a parameter.
func (s *parts) regionOf(p *param, rank int) checkpoint.Region {
	if !s.isPart(p.index) {
		return checkpoint.All(p.dims())
	}
	axis, lengths := s.axes[p.name], s.lengths[p.index]
	r := checkpoint.Region{Axis: axis, Shape: p.dims(), Length: lengths[rank]}
	r.Shape[axis] = 0
	for i, n := range lengths {
		r.Shape[axis] += n
		if i < rank {
			r.Start += n
		}
	}
	r.N = r.Length * checkpoint.Elements(r.Shape) / r.Shape[axis]
	return r
}

// check returns an error if anything that must be the same on all ranks with other parts is not.
func (s *parts) check(params []*param, rest []item) error {
	if s == nil {
		return nil
	}
	same := slices.DeleteFunc(slices.Clone(params), func(p *param) bool {
		return s.isPart(p.index)
	})
	comm := backend.Label(s.comm, backend.ForCheck)
	return alikeOn(comm, slices.Concat(items(same), rest), nil)
}
