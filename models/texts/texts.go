package texts

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/models/tokenizer"
)

// Ignored is a target that does not count: give it to [layers.Tokens.Padding].
//
// [layers.Tokens.Padding]: https://pkg.go.dev/github.com/euryale-ml/euryale/layers#Tokens.Padding
const Ignored = -1

const maxFile = 1 << 32 // bytes

// Sample is what a model sees at once: tokens, the next one of each as its target, or Ignored, and
// their positions in the documents of the sample, from 0. Document is the number of the document in
// the files, from 0: one text or conversation may be several samples.
type Sample struct {
	Tokens, Targets, Positions []int
	Document                   int // not of what Pack has put together
}

// Count returns how many targets count.
func (s Sample) Count() (n int) {
	for _, t := range s.Targets {
		if t != Ignored {
			n++
		}
	}
	return n
}

// Read makes samples of files, of up to context tokens and in their order, with the tokenizer and
// the chat template of a folder. cut is how many conversations have lost their end. A document
// without a target in the context is left out.
//
// Errors: [backend.ErrArgument] for a context below 1; those of tokenizer.Load; files that are not
// as the package describes, with the line; a conversation for which the folder has no template, or
// which the template refuses; those of the file system.
//
// Cost: memory for the files, and 24 bytes for each token; time for the tokens, and for the text of
// a conversation twice more with each answer, unless the template marks answers.
func Read(dir string, context int, paths ...string) (samples []Sample, cut int, err error) {
	if err := checked(context); err != nil {
		return nil, 0, err
	}
	t, err := tokenizer.Load(dir)
	if err != nil {
		return nil, 0, err
	}
	r := reader{dir: dir, context: context, tokens: t}
	for _, path := range paths {
		if err := r.file(path); err != nil {
			return nil, 0, fmt.Errorf("texts: %s: %w", path, err)
		}
	}
	return r.samples, r.cut, nil
}

func checked(context int) error {
	if context < 1 {
		return fmt.Errorf("texts: %w: a context of %d tokens: give 1 or more",
			backend.ErrArgument, context)
	}
	return nil
}

// reader makes samples.
type reader struct {
	dir      string
	context  int
	tokens   *tokenizer.Tokenizer
	template *template // nil until a conversation needs it
	samples  []Sample
	document int // of the next sample
	cut      int
}

func (r *reader) file(path string) error {
	text, err := files.Read(path, maxFile)
	if err == nil {
		text, err = files.UTF8(text)
	}
	if err != nil {
		return err
	}
	if filepath.Ext(path) != ".jsonl" {
		r.text(string(text))
		return nil
	}
	for i, line := range bytes.Split(text, []byte("\n")) {
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		if err := r.line(line); err != nil {
			return fmt.Errorf("line %d: %w", i+1, err)
		}
	}
	return nil
}

// line reads a document of a JSONL file.
func (r *reader) line(line []byte) error {
	var has map[string]json.RawMessage
	if err := json.Unmarshal(line, &has); err != nil {
		return err
	}
	maps.DeleteFunc(has, func(_ string, v json.RawMessage) bool { return string(v) == "null" })
	for _, key := range []string{"tools", "documents", "chat_template_kwargs"} {
		if !files.Empty(has[key]) {
			return fmt.Errorf("%s would change the text, and is not supported: leave it out", key)
		}
	}
	switch {
	case has["text"] != nil && has["messages"] == nil:
		var text string
		if err := json.Unmarshal(has["text"], &text); err != nil {
			return fmt.Errorf("text: %w", err)
		}
		r.text(text)
		return nil
	case has["messages"] != nil && has["text"] == nil:
		messages, err := conversation(has["messages"])
		if err == nil {
			err = r.conversation(messages)
		}
		return err
	}
	return fmt.Errorf("it has neither text nor messages, or both: give one of them")
}

// conversation reads messages, whose values are texts, or null where they need not be.
func conversation(text []byte) ([]message, error) {
	var messages []message
	if err := json.Unmarshal(text, &messages); err != nil {
		return nil, fmt.Errorf("messages: %w", err)
	}
	for i, m := range messages {
		for key, value := range m {
			is, ok := value.(string)
			switch {
			case !ok && value != nil:
				return nil, fmt.Errorf("messages: %s of message %d is no text: only texts are "+
					"supported", key, i)
			case strings.ContainsAny(is, begins+ends):
				return nil, fmt.Errorf("messages: %s of message %d has U+FDD0 or U+FDD1, which "+
					"are no characters", key, i)
			}
		}
		for _, key := range []string{"role", "content"} {
			if m[key] == nil {
				return nil, fmt.Errorf("messages: message %d has no %s: give it a text", i, key)
			}
		}
	}
	return messages, nil
}

// text adds the samples of a text.
func (r *reader) text(text string) {
	ids := r.tokens.Encode(text, true)
	if end := r.tokens.EOS; end >= 0 && len(ids) > 0 && ids[len(ids)-1] != end {
		ids = append(ids, end)
	}
	for ; len(ids) > 1; ids = ids[min(r.context, len(ids)-1):] {
		r.add(ids[:min(r.context+1, len(ids))], nil)
	}
	r.document++
}

// conversation adds the samples of a conversation.
func (r *reader) conversation(messages []message) (err error) {
	if r.template == nil {
		if r.template, err = loadTemplate(r.dir, r.tokens.Named); err != nil {
			return err
		}
	}
	all, err := r.template.speak(messages)
	if err != nil {
		return err
	}
	cut := false
	for _, s := range all {
		ids, answers := s.encode(r.tokens)
		n := min(len(ids), r.context+1)
		cut = cut || n < len(ids)
		r.add(ids[:n], answers[:n])
	}
	r.document++
	if cut {
		r.cut++
	}
	return nil
}

// add adds a sample of tokens, of which some count as targets: nil for all.
func (r *reader) add(ids []int, count []bool) {
	n := len(ids) - 1
	if n < 1 {
		return
	}
	s := Sample{ids[:n:n], slices.Clone(ids[1:]), make([]int, n), r.document}
	for i := range n {
		s.Positions[i] = i
		if count != nil && !count[i+1] {
			s.Targets[i] = Ignored
		}
	}
	if s.Count() > 0 {
		r.samples = append(r.samples, s)
	}
}

// Pack puts samples together, as many as fit into a context: the longest first, each where it
// leaves the least room. The positions of each begin at 0, as [models.Model.Logits] takes them, so
// that a document sees no other.
//
// Errors: [backend.ErrArgument] for a context below 1, and a sample that is longer than it.
//
// [models.Model.Logits]: https://pkg.go.dev/github.com/euryale-ml/euryale/models#Model.Logits
func Pack(samples []Sample, context int) (packed []Sample, err error) {
	if err := checked(context); err != nil {
		return nil, err
	}
	for i, s := range samples {
		if n := len(s.Tokens); n > context {
			return nil, fmt.Errorf("texts: %w: sample %d has %d tokens, more than the context of "+
				"%d: give both the same context", backend.ErrArgument, i, n, context)
		}
	}
	rooms := make([][]int, context+1) // those of packed by the room that they have
	samples = slices.Clone(samples)
	slices.SortStableFunc(samples, func(a, b Sample) int {
		return cmp.Compare(len(b.Tokens), len(a.Tokens))
	})
	for _, s := range samples {
		room := len(s.Tokens)
		for room < context && len(rooms[room]) == 0 {
			room++
		}
		at := len(packed)
		if last := len(rooms[room]) - 1; last >= 0 {
			at, rooms[room] = rooms[room][last], rooms[room][:last]
		} else {
			packed = append(packed, Sample{})
		}
		to := &packed[at]
		to.Tokens = append(to.Tokens, s.Tokens...)
		to.Targets = append(to.Targets, s.Targets...)
		to.Positions = append(to.Positions, s.Positions...)
		left := context - len(to.Tokens)
		rooms[left] = append(rooms[left], at)
	}
	return packed, nil
}
