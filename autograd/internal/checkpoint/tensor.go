package checkpoint

import (
	"fmt"
	"io"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// Tensor is what a rank has of a tensor of a checkpoint, or what it wants of it.
type Tensor struct {
	Name   string         // in files
	Shape  []int          // of Data
	Data   backend.Buffer // host memory, in row-major order; of what is wanted, its dtype alone
	Region Region         // where Data belongs
	Merge  Merge
	// Constant says that nothing trains the tensor, so that it may have infinities. All that
	// trains, and all that is kept for it, is finite.
	Constant bool
}

// Merge says what the ranks' elements are together, and so in which files they are.
type Merge int

const (
	Common  Merge = iota // the same on all ranks: the first one writes them
	Divided              // ranks divide the tensor by regions: each writes its own
	Own                  // each rank has a tensor of its own
	Each                 // so it is, and the first rank's is also common to all
)

// Whole returns a tensor of which a rank has all elements.
func Whole(name string, shape []int, data backend.Buffer, merge Merge) Tensor {
	return Tensor{Name: name, Shape: shape, Data: data, Region: All(shape), Merge: merge}
}

// Write writes a rank's files to a draft: its own file, unless that has no name, and on the first
// rank also the one of what ranks have in common.
func Write(draft files.Dir, own string, first bool, tensors []Tensor, said Remarks) (
	common []File, mine File, err error) {
	var ofRank, ofAll []Tensor
	for _, t := range tensors {
		if t.Merge != Common {
			ofRank = append(ofRank, t)
		}
		if t.Merge == Common || t.Merge == Each {
			ofAll = append(ofAll, t)
		}
	}
	if own != "" {
		if mine, err = WriteTensors(draft, own, ofRank, said); err != nil {
			return nil, mine, err
		}
	}
	if first {
		f, err := WriteTensors(draft, ModelName, ofAll, said)
		return []File{f}, mine, err
	}
	return nil, mine, nil
}

// CheckFinite returns an error that names the first element that is not finite.
func (t Tensor) CheckFinite() error {
	return t.refuse(safetensors.NotFinite(t.Data, t.Constant))
}

// sum is CheckFinite, and adds the bytes to a checksum in the same pass.
func (t Tensor) sum(to io.Writer) error {
	const chunk = 1 << 16 // elements, which stay in the cache
	for at := 0; at < t.Data.Len(); at += chunk {
		part := t.Data.Slice(at, min(at+chunk, t.Data.Len()))
		if i := safetensors.NotFinite(part, t.Constant); i >= 0 {
			return t.refuse(at + i)
		}
		to.Write(part.Bytes())
	}
	return nil
}

// refuse returns an error unless i, the place of an element that is not finite, is negative.
func (t Tensor) refuse(i int) error {
	if i < 0 {
		return nil
	}
	value := make([]float64, 1)
	if err := (kernels.Host{}).Cast(backend.Of(value), t.Data.Slice(i, i+1)); err != nil {
		return err
	}
	at := i
	t.Region.Meet(All(t.Region.Shape), func(from, to, n int) {
		if from <= i && i < from+n {
			at = to + i - from
		}
	})
	what := fmt.Sprintf("%q", t.Name)
	if of, is := strings.CutPrefix(t.Name, SolverPrefix); is {
		what = fmt.Sprintf("the solver's %q", of)
	}
	return fmt.Errorf("element %v of %s is %v", safetensors.Indices(at, t.Region.Shape), what,
		value[0])
}
