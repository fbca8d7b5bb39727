package models

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"math"
	"os"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// besides are the files of a folder that are copied as they are.
var besides = []string{"generation_config.json", "tokenizer.json", "tokenizer_config.json",
	"special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
	"tekken.json", "chat_template.jinja", "chat_template.json"}

// maxText is the most bytes of such a file.
const maxText = 256 << 20

// outdated are the files that programs would take for a part of a model, as patterns with numbers
// of five digits for stars: its other files of weights, and an adapter.
var outdated = []string{weightsName, indexName, "model-*-of-*.safetensors", "pytorch_model.bin",
	"pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin", adapterConfigName, adapterName,
	"adapter_model.bin"}

// Save writes a folder that Load and transformers read: the model with other weights, in the dtypes
// of the folder that was loaded, its configuration and its tokenizer. weights are whole learnables
// by name, such as those of a training or of a checkpoint, whatever the layout:
//
//	err := dp.Weights(func(weights iter.Seq2[string, *tensor.Dense]) error {
//		return m.Save("tuned", weights)
//	})
//
//	weights, err := autograd.ReadWeights(checkpoints)
//	err = m.Save("tuned", maps.All(weights))
//
// Tensors of more than MaxShardSize are divided among files, as transformers divides them. Each is
// converted and written as soon as it is there, several at a time.
//
// It is not collective: call it on one rank. The directory may exist, and be a URL, which the store
// of Load opens. Files have other names until all are on the disk, and what a process leaves that
// is killed before, the next Save to the directory removes. Save removes what programs would take
// for a part of the model: the index and the numbered files of an earlier model, weights in
// Python's format, an adapter, and a generation_config.json and files of a tokenizer that the
// model's own folder lacks. Other files stay. Unless one file of weights is all that changes, there
// is no config.json while files get their names, so that nothing loads parts of two models.
//
// Cost: a few MiB a core, and with a store, which has no other names, the memory of all files. On
// Windows, close models that were loaded from the directory: open files cannot be replaced. Errors:
// [backend.ErrArgument] for learnables that are missing, unknown or of another shape, with an
// element that is NaN, infinite or too large for the dtype of the folder, and for the folder that
// the model was loaded from; those of the file system. After an error the directory is as it was,
// unless files have their names already: then there is no config.json.
func (m *Model) Save(dir string, weights iter.Seq2[string, *tensor.Dense]) (err error) {
	defer named(&err, "save "+dir)
	if err := backend.Given("", "weights", weights); err != nil {
		return err
	}
	if _, err := m.dir.Stat("."); err != nil {
		return err // its tokenizer is copied below
	}
	in, err := files.At(dir, m.store...)
	if err != nil {
		return err
	}
	if same(in, m.dir) {
		return fmt.Errorf("%w: the model was loaded from there: name another one",
			backend.ErrArgument)
	}
	r := replacing{dir: in, main: configName, tensors: map[string]safetensors.Tensor{},
		texts: map[string][]byte{}, outdated: slices.Clone(outdated)}
	for name, file := range m.weights {
		d, shape, _ := file.Of(name)
		r.tensors[name] = safetensors.Declared(d, shape)
	}
	r.divide(cmp.Or(m.MaxShardSize, maxShardSize))
	if r.text, err = m.configText(); err != nil {
		return err
	}
	for _, name := range besides {
		text, err := m.dir.Read(name, maxText)
		if err == nil {
			r.texts[name] = text
		} else if r.outdated = append(r.outdated, name); !errors.Is(err, fs.ErrNotExist) &&
			!errors.Is(err, files.ErrPointer) { // nobody could use that
			return err
		}
	}
	return r.write(m, weights)
}

// maxShardSize is the most bytes of a file, unless Model.MaxShardSize says: it was transformers'
// before version 5.
const maxShardSize = 5e9

// configText returns config.json, which says whether there is a head.
func (m *Model) configText() ([]byte, error) {
	var was Config
	var o object
	if err := errors.Join(json.Unmarshal(m.text, &o), was.read(&o)); err != nil ||
		was.Tied == m.Tied {
		return m.text, err
	}
	all := map[string]json.RawMessage{}
	if err := json.Unmarshal(m.text, &all); err != nil {
		return nil, err
	}
	all["tie_word_embeddings"] = fmt.Append(nil, m.Tied)
	return json.MarshalIndent(all, "", "  ")
}

// same reports whether directories are one.
func same(a, b files.Dir) bool {
	x, err := a.Stat(".")
	y, wrong := b.Stat(".")
	return a.Path("") == b.Path("") || err == nil && wrong == nil && os.SameFile(x, y)
}

// replacing is a directory to write. Without the main file it has nothing that programs load.
type replacing struct {
	dir      files.Dir
	main     string
	text     []byte                        // of the main file
	tensors  map[string]safetensors.Tensor // without elements
	shards   map[string][]string           // their names, by file
	texts    map[string][]byte             // of other files
	outdated []string                      // patterns of files that have to go
	draft    *files.Draft
}

// divide divides the tensors among files of at most so many bytes, as transformers does: one that
// is larger is alone in its file. They are in the order of their names, by number where these have
// one, so that a layer follows the one before.
func (r *replacing) divide(most int64) {
	digits := regexp.MustCompile(`\d+`)
	sorted := slices.SortedFunc(maps.Keys(r.tensors), func(a, b string) int {
		pad := func(n string) string { return fmt.Sprintf("%12s", n) }
		return strings.Compare(digits.ReplaceAllStringFunc(a, pad),
			digits.ReplaceAllStringFunc(b, pad))
	})
	var all [][]string
	var last []string
	long := int64(0) // of last
	for _, name := range sorted {
		switch n := r.tensors[name].NBytes(); {
		case n > most:
			all = append(all, []string{name})
		case long+n > most:
			all, last, long = append(all, last), []string{name}, n
		default:
			last, long = append(last, name), long+n
		}
	}
	if last != nil {
		all = append(all, last)
	}
	r.shards = map[string][]string{weightsName: sorted}
	if len(all) < 2 {
		return
	}
	r.shards = map[string][]string{}
	var index struct {
		About struct {
			Elements int64 `json:"total_parameters"`
			Bytes    int64 `json:"total_size"`
		} `json:"metadata"`
		Files map[string]string `json:"weight_map"`
	}
	index.Files = map[string]string{}
	for i, names := range all {
		file := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(all))
		r.shards[file] = names
		for _, name := range names {
			t := r.tensors[name]
			index.About.Bytes += t.NBytes()
			index.About.Elements += t.NBytes() / int64(t.Data.DType().Size())
			index.Files[name] = file
		}
	}
	text, _ := json.MarshalIndent(index, "", "  ") // of numbers and strings
	r.texts[indexName] = append(text, '\n')
}

// write writes the files. If more than a file of tensors changes, the main one is away until all
// others have their names; after an error before the first has, it is there again.
func (r replacing) write(m *Model, weights iter.Seq2[string, *tensor.Dense]) (err error) {
	if r.draft, err = files.NewDraft(r.dir); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.draft.Close()) }()
	if err = r.encode(m, weights); err != nil {
		return err
	}
	r.texts[r.main] = r.text
	for name, text := range r.texts {
		f, err := r.draft.Create(name, int64(len(text)))
		if err == nil {
			_, err = f.WriteAt(text, 0)
		}
		if err != nil {
			return err
		}
	}
	if err = r.draft.Sync(); err != nil {
		return err
	}
	was, err := r.dir.Read(r.main, maxText)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	old, wrong := r.old()
	away := was != nil && (len(r.shards) > 1 || len(old) > 0 || r.changesTexts())
	if err = errors.Join(err, wrong); err == nil && away {
		err = r.remove(r.main)
	}
	return r.place(was, away, old, err)
}

// place gives the files their names, the main one last.
func (r replacing) place(was []byte, away bool, old []string, err error) error {
	placed := 0
	next := func(name string) {
		if err == nil {
			if err = r.draft.Place(name); err == nil {
				placed++
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.shards)) {
		next(name)
	}
	if err != nil && away && placed == 0 {
		return errors.Join(err, r.dir.Replace(r.main, files.Text(was)))
	}
	if err == nil {
		err = r.remove(old...)
	}
	for _, name := range slices.Sorted(maps.Keys(r.texts)) {
		if name != r.main {
			next(name)
		}
	}
	if err == nil {
		err = r.dir.Sync(".")
	}
	next(r.main)
	if err == nil {
		err = r.dir.Sync(".")
	}
	return err
}

// changesTexts reports whether a file of text is not there as it will be.
func (r replacing) changesTexts() bool {
	for name, text := range r.texts {
		was, err := r.dir.Read(name, maxText)
		if err != nil || !bytes.Equal(was, text) {
			return true
		}
	}
	return false
}

// old returns the files of the directory that have to go.
func (r replacing) old() (names []string, err error) {
	all, err := r.dir.ReadDir(".")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, pattern := range r.outdated {
		pattern = strings.ReplaceAll(pattern, "*", strings.Repeat("[0-9]", 5))
		for _, e := range all {
			is, wrong := path.Match(pattern, e.Name())
			_, new := r.texts[e.Name()]
			if is && !new && r.shards[e.Name()] == nil || wrong != nil {
				names, err = append(names, e.Name()), errors.Join(err, wrong)
			}
		}
	}
	return names, err
}

// remove removes files, which need not be there.
func (r replacing) remove(names ...string) (err error) {
	for _, name := range names {
		if removed := r.dir.Remove(name); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	return errors.Join(err, r.dir.Sync("."))
}

// encode writes learnables to the files of the draft: in the dtypes of the folder that was loaded,
// and in F32 for an adapter.
func (r replacing) encode(m *Model, weights iter.Seq2[string, *tensor.Dense]) error {
	places, err := r.beginFiles()
	if err != nil {
		return err
	}
	parts, ctx := errgroup.WithContext(context.Background())
	parts.SetLimit(runtime.GOMAXPROCS(0))
	scratch := &sync.Pool{} // or garbage would be as much as the model
	seen := map[string]bool{}
	for learnable, x := range weights {
		name, err := "", context.Cause(ctx)
		if err == nil {
			name, err = r.convert(m, learnable, x, places, parts, scratch)
		}
		if seen[name] = true; err != nil {
			_ = parts.Wait() // if it has failed, that is the cause
			return fmt.Errorf("%s: %w", learnable, err)
		}
	}
	if err := parts.Wait(); err != nil {
		return err
	}
	if name := lacking(r.tensors, seen); name != "" {
		return fmt.Errorf("%w: there is no %s among the weights: give all learnables",
			backend.ErrArgument, strings.TrimPrefix(name, adapterPrefix))
	}
	return nil
}

// spot is where the elements of a tensor are written.
type spot struct {
	file io.WriterAt
	at   int64
}

// beginFiles makes the files of tensors, and returns the places of these.
func (r replacing) beginFiles() (map[string]spot, error) {
	places := map[string]spot{}
	for file, names := range r.shards {
		in := map[string]safetensors.Tensor{}
		for _, name := range names {
			in[name] = r.tensors[name]
		}
		begin, err := safetensors.Begin(in, map[string]string{"format": "pt"})
		if err != nil {
			return nil, err
		}
		at := int64(len(begin))
		for _, t := range in {
			at += t.NBytes()
		}
		f, err := r.draft.Create(file, at)
		if err == nil {
			_, err = f.WriteAt(begin, 0)
		}
		if err != nil {
			return nil, err
		}
		at = int64(len(begin))
		for _, name := range slices.Sorted(maps.Keys(in)) {
			places[name] = spot{f, at}
			at += in[name].NBytes()
		}
	}
	return places, nil
}

// partLength is how many elements are converted at once: with more a core's cache holds less than
// all of them, and with fewer the system writes more often than it needs to.
const partLength = 1 << 19

// convert starts the conversion of a learnable to its tensor, in parts, and returns its name.
func (r replacing) convert(m *Model, learnable string, x *tensor.Dense, places map[string]spot,
	parts *errgroup.Group, scratch *sync.Pool) (string, error) {
	if err := hasAxes(x); err != nil {
		return "", err
	}
	s := m.stored(learnable, x.Shape())
	if !strings.HasPrefix(s.name, adapterPrefix) {
		var err error
		if s, err = m.find(learnable, x.Shape()); err != nil {
			return "", err
		}
	}
	to, ok := places[s.name]
	if !ok {
		return "", fmt.Errorf("%w: %s is among the weights, but the model has no such weight, or "+
			"the adapter: leave it out", backend.ErrArgument, s.name)
	}
	own, _ := residence.DType(x.Dtype())
	elements, err := residence.Elements(x, own)
	if err = cmp.Or(err, residence.Present(elements)); err != nil {
		return "", err
	}
	count, row := elements.Len(), 1 // rows of the file
	if s.transposed {
		count, row = s.shape[0], s.shape[1]
	}
	d := r.tensors[s.name].Data.DType()
	step := max(1, partLength/max(row, 1))
	for from := 0; from < count; from += step {
		length := min(step, count-from)
		parts.Go(func() error {
			p := rows{from * row, elements.Slice(from, elements.Len()), []int{length, row}, nil}
			if s.transposed {
				p.strides = []int{1, count}
			}
			room, _ := scratch.Get().(*backend.Buffer)
			if n := length * row * (own.Size() + d.Size()); room == nil || room.Len() < n {
				more := residence.Zeros(backend.U8, n)
				room = &more
			}
			defer scratch.Put(room)
			if err := p.write(to, d, s.shape, *room); err != nil {
				return fmt.Errorf("%s: %w", learnable, err)
			}
			return nil
		})
	}
	return s.name, nil
}

func hasAxes(x *tensor.Dense) error {
	if x == nil || x.Dims() == 0 {
		return fmt.Errorf("%w: it is nil or a scalar", backend.ErrArgument)
	}
	return nil
}

// rows are a part of a tensor of a file.
type rows struct {
	first          int            // of its elements, in the tensor
	elements       backend.Buffer // from the first one on
	shape, strides []int          // where the others are; no strides if they follow each other
}

// write converts a part to a dtype, and writes it. room is for its elements in both dtypes.
func (p rows) write(to spot, d backend.DType, shape []int, room backend.Buffer) error {
	n := p.shape[0] * p.shape[1]
	values := p.elements.Slice(0, min(n, p.elements.Len()))
	own := n * values.DType().Size()
	if p.strides != nil {
		values = room.Slice(0, own).As(values.DType())
		if err := (kernels.Host{}).CopyStrided(values, p.elements, p.shape,
			p.strides); err != nil {
			return err
		}
	}
	wide, err := numbers(values)
	if err != nil {
		return err
	}
	is := room.Slice(own, own+n*d.Size()).As(d)
	if err := (kernels.Host{}).Cast(is, wide); err != nil {
		return err
	}
	if err := checkFinite(is, wide, p.first, shape); err != nil {
		return err
	}
	_, err = to.file.WriteAt(is.Bytes(), to.at+int64(p.first*d.Size()))
	return err
}

// checkFinite returns an error for an element of a file's tensor that is not finite, given the
// values that were cast to its dtype, of which the first one has a number in the tensor.
func checkFinite(is, values backend.Buffer, first int, shape []int) error {
	i := safetensors.NotFinite(is, false)
	if i < 0 {
		return nil
	}
	x := make([]float64, 1)
	if err := (kernels.Host{}).Cast(backend.Of(x), values.Slice(i, i+1)); err != nil {
		return err
	}
	at := safetensors.Indices(first+i, shape)
	if math.IsNaN(x[0]) || math.IsInf(x[0], 0) {
		return fmt.Errorf("%w: element %v is %v: the model has diverged: save an earlier "+
			"checkpoint", backend.ErrArgument, at, x[0])
	}
	return fmt.Errorf("%w: element %v is %v, more than %v can hold, which the folder has: "+
		"load the model from a folder in bf16 or f32, and save that", backend.ErrArgument, at, x[0],
		is.DType())
}
