package checkpoint

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// Wanted is what a rank wants of a checkpoint.
type Wanted struct {
	Tensors []Tensor               // the regions of those that the files have
	Rest    func(name string) bool // whether it wants the whole of another tensor
	// Constants says that the rest may have infinities: it is unknown what is trained.
	Constants bool
}

// Read reads what a rank wants of a checkpoint for which the given number of ranks have written
// shards. A tensor that has another shape or dtype than it should is whole in the result, for the
// caller to refuse, unless the rank wants only a part of it.
func Read(in files.Dir, of Stamp, shards int, want Wanted) (map[string]stored, error) {
	a := assembly{in: in, of: of, want: want, tensors: map[string]Tensor{}}
	for _, t := range want.Tensors {
		a.tensors[t.Name] = t
	}
	all, err := a.assemble(shards)
	return all, errors.Join(a.wrong, err)
}

// assembly puts together what is wanted of the tensors of a checkpoint, file by file.
type assembly struct {
	in      files.Dir
	of      Stamp
	want    Wanted
	tensors map[string]Tensor // those of want
	wrong   error             // with tensors of the program, not with files

	have map[string]*assembled // by names in files
	most int64                 // bytes of all files
	left int64                 // of these, for elements of which no file was read
}

// assembled is the needed part of a tensor, and how many of its elements were found.
type assembled struct {
	stored
	want Region
	got  int
}

// assemble reads the files, with the shards of a number of ranks.
func (a *assembly) assemble(shards int) (map[string]stored, error) {
	a.have = map[string]*assembled{}
	sizes := map[string]int64{}
	for _, f := range a.of.Files {
		sizes[f.Name] = f.Bytes
	}
	for _, n := range sizes {
		a.most += n
	}
	a.left = a.most
	err := a.read(ModelName, false)
	for rank := 0; rank < shards && err == nil; rank++ {
		err = a.read(RankName(rank), true)
	}
	if err != nil {
		return nil, err
	}
	all := map[string]stored{}
	for name, t := range a.have {
		if t.got != t.want.N {
			return nil, &Damaged{Path: a.in.Path(""), Cause: fmt.Errorf("its files have %d "+
				"elements of %s where %d are needed", t.got, name, t.want.N)}
		}
		all[name] = t.stored
	}
	return all, nil
}

// read takes what is needed from a file, which is read to its end if it has any of it. A file of
// shards may have other tensors.
func (a *assembly) read(file string, shards bool) error {
	at := map[string]Region{}
	return readFile(a.in, a.of, file, func(h *safetensors.Header) (needed bool, err error) {
		said, err := shardsIn(h)
		for _, name := range h.Names() {
			has, ok := said[name]
			if _, shape, _ := h.Of(name); !shards {
				has, ok = All(shape), true
			} else if has.N = Elements(shape); ok {
				err = a.checkRegion(name, has, err)
			}
			if !ok || err != nil {
				continue
			}
			if has, ok, err = a.place(name, has, h); ok {
				at[name] = has
				has.Meet(a.have[name].want, func(int, int, int) { needed = true })
			}
		}
		return needed, err
	}, func(name string, t stored) error {
		has, ok := at[name]
		if !ok {
			return nil
		}
		a.have[name].take(has, t)
		of, listed := a.tensors[name]
		return Tensor{Name: name, Shape: t.Shape, Data: t.Data, Region: has,
			Constant: of.Constant || !listed && a.want.Constants}.CheckFinite()
	})
}

// place makes room for what is needed of a tensor, and returns where those of a file belong.
func (a *assembly) place(name string, has Region, h *safetensors.Header) (Region, bool, error) {
	d, own, _ := h.Of(name)
	want, shape, ok := a.needed(name, has, d)
	if !ok {
		return has, false, nil
	}
	t := a.have[name]
	if t == nil {
		more, size := int64(max(0, want.N-has.N)), int64(d.Size())
		if more > a.left/size {
			return has, false, fmt.Errorf("%s is %v%v, and the files have fewer elements", name, d,
				has.Shape)
		}
		a.left -= more * size
		t = &assembled{stored{Shape: shape, Data: residence.Zeros(d, want.N)}, want, 0}
		a.have[name] = t
	}
	if has.N == Elements(want.Shape) && slices.Equal(own, has.Shape) { // also a vector of a matrix
		has = All(want.Shape)
	}
	if d != t.Data.DType() || !slices.Equal(has.Shape, t.want.Shape) {
		return has, false, fmt.Errorf("%s is %v%v, and in other files %v%v", name, d, has.Shape,
			t.Data.DType(), t.want.Shape)
	}
	return has, true, nil
}

// needed returns which elements of a tensor are wanted, what shape they then have, and whether any
// are.
func (a *assembly) needed(name string, has Region, d backend.DType) (Region, []int, bool) {
	t, listed := a.tensors[name]
	if !listed {
		return All(has.Shape), has.Shape, a.want.Rest(name)
	}
	want := t.Region
	fits := slices.Equal(has.Shape, want.Shape) || // or it is a vector of a tensor's elements
		len(t.Shape) == 1 && len(want.Shape) != 1 && Elements(has.Shape) == Elements(want.Shape)
	switch {
	case fits && d == t.Data.DType():
		return want, t.Shape, true
	case want.N < Elements(want.Shape):
		a.wrong = cmp.Or(a.wrong, fmt.Errorf("%w: %s of the checkpoint is %v%v, and the whole of "+
			"it is %v%v here: give the model the checkpoint's sizes, or load another checkpoint",
			backend.ErrArgument, name, d, has.Shape, t.Data.DType(), want.Shape))
		return Region{}, nil, false
	}
	return All(has.Shape), has.Shape, true
}

// checkRegion refuses what a file says of a tensor, unless there is an error before.
func (a *assembly) checkRegion(name string, has Region, before error) error {
	if before != nil {
		return before
	}
	if err := has.check(a.most); err != nil {
		return fmt.Errorf("tensor %q: %w", name, err)
	}
	return nil
}

// take copies what is needed of a tensor's elements.
func (t *assembled) take(has Region, from stored) {
	size := from.Data.DType().Size()
	has.Meet(t.want, func(i, k, n int) {
		copy(t.Data.Bytes()[k*size:(k+n)*size], from.Data.Bytes()[i*size:])
		t.got += n
	})
}

// ReadPart reads a file of the checkpoint in a directory, which must be the one that the record
// says. constant says which tensors may have infinities, nil for none.
func ReadPart(in files.Dir, of Stamp, name string, constant func(name string) bool) (
	map[string]stored, error) {
	all := map[string]stored{}
	needed := func(*safetensors.Header) (bool, error) { return true, nil }
	return all, readFile(in, of, name, needed, func(name string, t stored) error {
		all[name] = t
		whole := Whole(name, t.Shape, t.Data, Own)
		whole.Constant = constant != nil && constant(name)
		return whole.CheckFinite()
	})
}

// readFile is ReadPart that hands over tensors one by one, and reads none from a file that is not
// needed. take returns an error for a tensor that is not finite.
func readFile(in files.Dir, of Stamp, name string,
	needs func(*safetensors.Header) (bool, error), take func(name string, t stored) error) error {
	f, err := Open(in, of, name)
	if err != nil {
		return ofAnother(in, of, name, err)
	}
	defer f.Close()
	var wrong error
	needed, err := decodeEach(bufio.NewReader(f), f.Bytes, needs, func(name string, t stored) {
		wrong = cmp.Or(wrong, take(name, t))
	})
	if err != nil {
		err = damagedFile(in.Path(name), err)
	} else if needed {
		err = f.Check()
	}
	if err == nil && wrong != nil {
		err = &Damaged{Path: in.Path(name), Cause: wrong, Diverged: true}
	}
	if err != nil {
		return ofAnother(in, of, name, err)
	}
	return nil
}

// ofAnother says that a file belongs to a different Save than the record, if that is the problem.
func ofAnother(in files.Dir, of Stamp, name string, wrong error) error {
	f, err := Open(in, Stamp{}, name)
	if err != nil {
		return wrong
	}
	defer f.Close()
	said, err := readRemarks(f, f.Bytes)
	if err != nil || said.Save == of.ID {
		return wrong
	}
	other := Stamp{ID: said.Save}
	fmt.Sscan(said.Step, &other.Step)
	wrong = fmt.Errorf("it belongs to %v, and the record to %v", other, of)
	return &Damaged{Path: in.Path(name), Cause: wrong}
}
