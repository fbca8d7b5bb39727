package autograd

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// region says where consecutive elements belong in a tensor: they begin at element From of a part
// that has Length places along Axis, from Start on. In the files of checkpoints it describes a
// rank's elements.
type region struct {
	Shape  []int `json:"shape"` // of the whole tensor
	Axis   int   `json:"axis"`
	Start  int   `json:"start"`
	Length int   `json:"length"`
	From   int   `json:"from"`
	n      int   // elements
}

// whole is the region of all elements.
func whole(shape []int) region {
	return region{Shape: shape, Length: product(shape[:min(1, len(shape))]), n: product(shape)}
}

// regionOf returns which elements this rank keeps of a parameter, and of what belongs to it element
// by element.
func (d *DataParallel) regionOf(p *param) region {
	r := whole(p.dims())
	if s := d.parts; s.divided(p.index) {
		r.Axis = s.axes[p.name]
		r.Shape, r.Length = s.wholeShape(p), p.shape[r.Axis]
		for _, n := range s.lengths[p.index][:s.comm.Rank()] {
			r.Start += n
		}
	}
	if d.sharded {
		s := d.shardOf(p, d.comm.Rank())
		r.From, r.n = s.from, s.to-s.from
	}
	return r
}

// row and block return how many elements belong to one place along the axis, and to all places.
func (r region) row() int   { return product(r.Shape[min(r.Axis+1, len(r.Shape)):]) }
func (r region) block() int { return product(r.Shape[min(r.Axis, len(r.Shape)):]) }

// check refuses a region of a file, of a tensor of more elements than its files may have.
func (r region) check(most int64) error {
	axes := max(1, len(r.Shape)) // a number has one, of one place
	ok := r.Axis >= 0 && r.Axis < axes && r.Start >= 0 && r.Length >= 0 && r.From >= 0
	n := int64(1)
	for _, d := range r.Shape {
		ok = ok && d >= 0 && (d == 0 || n <= most/int64(d))
		n *= int64(max(d, 0))
	}
	if ok {
		places := r.block() / max(1, r.row())
		ok = r.Length <= places && r.Start <= places-r.Length &&
			r.From <= product(r.Shape)/max(1, r.block())*r.Length*r.row()-r.n
	}
	if !ok {
		return fmt.Errorf("%d elements are not of a tensor of %v as it says (%+v)", r.n, r.Shape, r)
	}
	return nil
}

// meet calls f with each run of elements that two regions of a tensor have in common: n elements,
// from i on in r and from k on in o.
func (r region) meet(o region, f func(i, k, n int)) {
	for i := 0; i < r.n; {
		part := r.Length * r.row()
		at := (r.From + i) % part
		k, n, in := o.find((r.From+i)/part*r.block() + r.Start*r.row() + at)
		if n = min(n, part-at, r.n-i); in {
			f(i, k, n)
		}
		i += n
	}
}

// find returns which element of the region is at a place in the whole, if any is, and for how many
// places from there on this holds.
func (r region) find(at int) (i, n int, in bool) {
	block, from, to := r.block(), r.Start*r.row(), (r.Start+r.Length)*r.row()
	switch c := at % block; {
	case c < from:
		return 0, from - c, false
	case c >= to:
		return 0, block - c, false
	default:
		i, n = at/block*(to-from)+c-from-r.From, to-c
	}
	switch {
	case i < 0:
		return 0, min(n, -i), false
	case i >= r.n:
		return 0, n, false
	}
	return i, min(n, r.n-i), true
}

// assembly puts together what is needed of the tensors of a checkpoint, file by file.
type assembly struct {
	dir string
	of  checkpoint.Stamp
	// need returns which elements of a tensor are needed, of what shape they are then, and whether
	// any are.
	need func(name string, has region, d backend.DType) (want region, shape []int, ok bool)
	// reports whether a tensor that is needed may have infinities: see finiteness
	constants func(name string) bool

	have map[string]*assembled // by names in files
	most int64                 // bytes of all files
	left int64                 // of these, for elements of which no file was read
}

// assembled is the needed part of a tensor, and how many of its elements were found.
type assembled struct {
	stored
	want region
	got  int
}

// assemble reads what is needed of a checkpoint for which the given number of ranks have written
// shards.
func (a *assembly) assemble(shards int) (map[string]stored, error) {
	a.have = map[string]*assembled{}
	files := map[string]int64{}
	for _, f := range a.of.Files {
		files[f.Name] = f.Bytes
	}
	for _, n := range files {
		a.most += n
	}
	a.left = a.most
	err := a.read(checkpoint.ModelName, false)
	for rank := 0; rank < shards && err == nil; rank++ {
		err = a.read(checkpoint.RankName(rank), true)
	}
	if err != nil {
		return nil, err
	}
	all := map[string]stored{}
	for name, t := range a.have {
		if t.got != t.want.n {
			return nil, &checkpoint.Damaged{Path: a.dir, Cause: fmt.Errorf("its files have %d "+
				"elements of %s where %d are needed", t.got, name, t.want.n)}
		}
		all[name] = t.stored
	}
	return all, nil
}

// read takes what is needed from a file, which is read to its end if it has any of it. A file of
// shards may have other tensors.
func (a *assembly) read(file string, shards bool) error {
	at := map[string]region{}
	return readFile(a.dir, a.of, file, func(h *safetensors.Header) (needed bool, err error) {
		said, err := remarksOf(h).regions()
		for _, name := range h.Names() {
			has, ok := said[name]
			if _, shape, _ := h.Of(name); !shards {
				has, ok = whole(shape), true
			} else if has.n = product(shape); ok {
				err = a.checkRegion(name, has, err)
			}
			if !ok || err != nil {
				continue
			}
			if has, ok, err = a.place(name, has, h); ok {
				at[name] = has
				has.meet(a.have[name].want, func(int, int, int) { needed = true })
			}
		}
		return needed, err
	}, func(name string, t stored) error {
		has, ok := at[name]
		if !ok {
			return nil
		}
		a.have[name].take(has, t)
		return finiteness{a.constants, at}.check(name, t)
	})
}

// place makes room for what is needed of a tensor, and returns where those of a file belong.
func (a *assembly) place(name string, has region, h *safetensors.Header) (region, bool, error) {
	d, own, _ := h.Of(name)
	want, shape, ok := a.need(name, has, d)
	if !ok {
		return has, false, nil
	}
	t := a.have[name]
	if t == nil {
		more, size := int64(max(0, want.n-has.n)), int64(d.Size())
		if more > a.left/size {
			return has, false, fmt.Errorf("%s is %v%v, and the files have fewer elements", name, d,
				has.Shape)
		}
		a.left -= more * size
		t = &assembled{stored{Shape: shape, Data: residence.Zeros(d, want.n)}, want, 0}
		a.have[name] = t
	}
	if has.n == product(want.Shape) && slices.Equal(own, has.Shape) { // a vector may be of a matrix
		has = whole(want.Shape)
	}
	if d != t.Data.DType() || !slices.Equal(has.Shape, t.want.Shape) {
		return has, false, fmt.Errorf("%s is %v%v, and in other files %v%v", name, d, has.Shape,
			t.Data.DType(), t.want.Shape)
	}
	return has, true, nil
}

// checkRegion refuses what a file says of a tensor, unless there is an error before.
func (a *assembly) checkRegion(name string, has region, before error) error {
	if before != nil {
		return before
	}
	if err := has.check(a.most); err != nil {
		return fmt.Errorf("tensor %q: %w", name, err)
	}
	return nil
}

// take copies what is needed of a tensor's elements.
func (t *assembled) take(has region, from stored) {
	size := from.Data.DType().Size()
	has.meet(t.want, func(i, k, n int) {
		copy(t.Data.Bytes()[k*size:(k+n)*size], from.Data.Bytes()[i*size:])
		t.got += n
	})
}
