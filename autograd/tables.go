package autograd

import (
	"fmt"
	"strings"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Table is a table of numbers whose rows the ranks of a communicator shard, like those of package
// layers: row i is row i/P of rank i modulo P.
type Table interface {
	Name() string
	Size() (rows, n int) // of all ranks, and the numbers of a row
	DType() backend.DType
	// State returns a copy of what this rank has: its rows, with the name "", the solver's vectors
	// for their numbers, of the same dtype, and integers that are the same on all ranks.
	State() map[string]backend.Buffer
	// SetState restores what State has returned on a rank with the same rows.
	SetState(map[string]backend.Buffer) error
}

// tables are what one of the ranks that shard their rows has.
type tables struct {
	all         []Table
	rank, ranks int
}

// described says what tables a program and its checkpoints have.
func (d tables) described() (all []string) {
	for _, t := range d.all {
		rows, n := t.Size()
		all = append(all, fmt.Sprintf("%s of %d rows of %d %v", t.Name(), rows, n, t.DType()))
	}
	return all
}

// tablePrefix begins those of a table: "table/items/", and the name there.
func tablePrefix(t Table) string { return tableFiles + t.Name() + "/" }

// rows returns what this rank has of tables.
func (d tables) rows() (all []checkpoint.Tensor) {
	for _, t := range d.all {
		_, n := t.Size()
		for name, b := range t.State() {
			shape := []int{b.Len()}
			if b.DType() == t.DType() {
				shape = []int{b.Len() / n, n}
			}
			all = append(all, checkpoint.Whole(tablePrefix(t)+name, shape, b, checkpoint.Own))
		}
	}
	return all
}

// read reads this rank's rows of all tables from the files of the ranks that had them, by
// table and name.
func (d tables) read(in files.Dir, of checkpoint.Stamp, ranks int) (
	[]map[string]backend.Buffer, error) {
	all := make([]map[string]backend.Buffer, len(d.all))
	for i := range all {
		all[i] = map[string]backend.Buffer{}
	}
	for rank := 0; rank < ranks && len(all) > 0; rank++ {
		if !d.meets(rank, ranks) {
			continue
		}
		name := checkpoint.RankName(rank)
		file, err := checkpoint.ReadPart(in, of, name, nil)
		for i := 0; i < len(all) && err == nil; i++ {
			err = d.takeRows(all[i], d.all[i], file, rank, ranks)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", in.Path(name), err)
		}
	}
	return all, nil
}

// meets reports whether this rank has rows that the given rank of so many had.
func (d tables) meets(rank, of int) bool {
	for row := rank; row < rank+of*d.ranks; row += of {
		if row%d.ranks == d.rank {
			return true
		}
	}
	return false
}

// takeRows takes this rank's rows of a table from the file of a rank of so many.
func (d tables) takeRows(to map[string]backend.Buffer, t Table, file map[string]stored,
	rank, of int) error {
	rows, n := t.Size()
	size := n * t.DType().Size()
	has := (rows - rank + of - 1) / of
	if _, ok := file[tablePrefix(t)]; !ok {
		return fmt.Errorf("%w: there are no rows of table %s", backend.ErrArgument, t.Name())
	}
	for name, from := range file {
		name, is := strings.CutPrefix(name, tablePrefix(t))
		switch {
		case !is:
			continue
		case from.Data.DType() != t.DType():
			to[name] = from.Data
			continue
		case from.Data.Len() != has*n:
			return fmt.Errorf("%w: table %s has %d numbers there, want %d rows of %d",
				backend.ErrArgument, t.Name(), from.Data.Len(), has, n)
		case to[name].Len() == 0:
			to[name] = residence.Zeros(t.DType(), (rows-d.rank+d.ranks-1)/d.ranks*n)
		}
		for k := range has {
			if row := k*of + rank; row%d.ranks == d.rank {
				copy(to[name].Bytes()[row/d.ranks*size:][:size], from.Data.Bytes()[k*size:])
			}
		}
	}
	return nil
}

// fill gives tables what a checkpoint has of them: of weights alone, no solver.
func (d tables) fill(l loaded) error {
	for i, t := range d.all {
		state := l.tables[i]
		if l.weightsOnly {
			state = map[string]backend.Buffer{"": state[""]}
		}
		if err := t.SetState(state); err != nil {
			return err
		}
	}
	return nil
}
