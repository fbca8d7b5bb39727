package texts

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
	"github.com/nikolalohinski/gonja/v2/nodes"
	"github.com/nikolalohinski/gonja/v2/parser"
	"github.com/nikolalohinski/gonja/v2/tokens"

	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/models/tokenizer"
)

const (
	templateName, configName = "chat_template.jinja", "tokenizer_config.json"
	maxTemplate, maxConfig   = 1 << 20, 64 << 20 // bytes

	// begins and ends are around {% generation %}: noncharacters, which no text has.
	begins, ends = "\uFDD0", "\uFDD1"
)

// template is a chat template.
type template struct {
	program *exec.Template
	marks   bool // answers, by {% generation %}
	named   map[string]string
}

// message is one of a conversation: texts, or nil, by their keys.
type message map[string]any

// loadTemplate reads the chat template of a folder.
func loadTemplate(dir string, named map[string]string) (*template, error) {
	source, err := files.Read(filepath.Join(dir, templateName), maxTemplate)
	name := templateName
	if errors.Is(err, fs.ErrNotExist) {
		source, err = configured(dir)
		name = configName
	}
	if err != nil {
		return nil, err
	}
	t := &template{marks: generation.Match(source), named: named}
	if t.program, err = parsed(source); err != nil {
		return nil, fmt.Errorf("%s: %w: give the folder a simpler template", name, err)
	}
	return t, nil
}

// configured returns the template of tokenizer_config.json.
func configured(dir string) ([]byte, error) {
	var has struct {
		Template json.RawMessage `json:"chat_template"`
	}
	_, err := files.Disk(dir).ReadJSON(configName, maxConfig, &has)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var text string
	var list []struct{ Name, Template string }
	if json.Unmarshal(has.Template, &text) != nil && json.Unmarshal(has.Template, &list) == nil {
		for _, one := range list {
			if one.Name == "default" {
				text = one.Template
			}
		}
	}
	if text == "" {
		return nil, fmt.Errorf("the folder has no chat template, in %s or %s: add one, or give "+
			"texts", templateName, configName)
	}
	return []byte(text), nil
}

var (
	// generation matches the statement by which templates mark answers.
	generation = regexp.MustCompile(`\{%-?\s*generation\s*-?%\}`)
	// within matches space before a statement within a line: Jinja keeps it, and gonja would not.
	within = regexp.MustCompile(`(?m)(\S)([ \t]+)(\{[%#][^-+])`)
	// strips matches methods that strip spaces, for which gonja has no default.
	strips = regexp.MustCompile(`\.([lr]strip)\(\s*\)`)
)

// parsed returns the program of a template, in the environment in which transformers has it.
func parsed(source []byte) (t *exec.Template, err error) {
	defer recovered(&err)
	source = within.ReplaceAll(source, []byte(`$1{{ "$2" }}$3`))
	source = strips.ReplaceAll(source, []byte(`.$1(" \n\t\r")`))
	c := config.New()
	c.TrimBlocks, c.LeftStripBlocks = true, true
	return exec.NewTemplate("/", c, alone{source}, &exec.Environment{
		Context: exec.EmptyContext().Update(builtins.GlobalFunctions).Update(
			exec.NewContext(map[string]any{"raise_exception": raise})),
		Filters: builtins.Filters, Tests: builtins.Tests, Methods: builtins.Methods,
		ControlStructures: exec.NewControlStructureSet(map[string]parser.ControlStructureParser{
			"generation": parseAnswer,
		}).Update(builtins.ControlStructures),
	})
}

// recovered makes a panic an error.
func recovered(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("the template panics: %v", r)
	}
}

// alone is a loader of the template itself and of no other file.
type alone struct{ source []byte }

func (a alone) Read(path string) (io.Reader, error) {
	if path != "/" || a.source == nil {
		return nil, fmt.Errorf("it reads %.80q: templates that read files are not supported", path)
	}
	return bytes.NewReader(a.source), nil
}

func (alone) Resolve(path string) (string, error) { return path, nil }

func (alone) Inherit(string) (loaders.Loader, error) { return alone{}, nil }

// raise is raise_exception of transformers.
func raise(_ *exec.Evaluator, with *exec.VarArgs) (*exec.Value, error) {
	return nil, errors.New(with.First().String())
}

// answer is what {% generation %} has: a part that the assistant writes.
type answer struct {
	body *nodes.Wrapper
	at   *tokens.Token
}

func parseAnswer(p, _ *parser.Parser) (nodes.ControlStructure, error) {
	at := p.Current()
	body, _, err := p.WrapUntil("endgeneration")
	return &answer{body, at}, err
}

func (a *answer) Position() *tokens.Token { return a.at }
func (a *answer) String() string          { return "generation" }

// Execute marks what the body writes.
func (a *answer) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	_, err := io.WriteString(r.Output, begins)
	if err == nil {
		err = r.ExecuteWrapper(a.body)
	}
	if err == nil {
		_, err = io.WriteString(r.Output, ends)
	}
	return err
}

// span is the part of a text from one byte to another.
type span struct{ from, to int }

// render writes messages, and with asks what comes before an answer. It returns where the template
// says that answers are.
func (t *template) render(messages []message, asks bool) (text string, answers []span, err error) {
	defer recovered(&err)
	context := map[string]any{"messages": messages, "tools": nil, "documents": nil,
		"add_generation_prompt": asks}
	for name, token := range t.named {
		context[name] = token
	}
	marked, err := t.program.ExecuteToString(exec.NewContext(context))
	if err != nil {
		if _, why, raised := strings.Cut(err.Error(), "'raise_exception': "); raised {
			err = fmt.Errorf("the template refuses it: %s", why)
		}
		return "", nil, err
	}
	var b strings.Builder
	for marked != "" {
		at := strings.IndexAny(marked, begins+ends)
		if at < 0 {
			at = len(marked)
		}
		b.WriteString(marked[:at])
		marked = marked[at:]
		if rest, ok := strings.CutPrefix(marked, begins); ok {
			marked, answers = rest, append(answers, span{b.Len(), b.Len()})
		} else if rest, ok := strings.CutPrefix(marked, ends); ok && len(answers) > 0 {
			marked, answers[len(answers)-1].to = rest, b.Len()
		} else {
			marked = marked[min(len(marked), len(ends)):]
		}
	}
	return b.String(), answers, nil
}

// spoken is a text of a conversation and its answers.
type spoken struct {
	text    string
	answers []span
}

// speak returns the texts of a conversation, on which a model trains: one, or one for each answer
// where the template writes answers in another way once messages follow.
func (t *template) speak(messages []message) (all []spoken, err error) {
	whole, answers, err := t.render(messages, false)
	if err != nil || t.marks {
		return []spoken{{whole, answers}}, err
	}
	apart := false
	for i, m := range messages {
		if m["role"] != "assistant" {
			continue
		}
		before, _, err := t.render(messages[:i], true)
		text := ""
		if err == nil {
			text, _, err = t.render(messages[:i+1], false)
		}
		if err == nil && !strings.HasPrefix(text, before) {
			err = errors.New("the template does not begin an answer with what asks for it: mark " +
				"answers in it by {% generation %}")
		}
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		all = append(all, spoken{text, []span{{len(before), len(text)}}})
		end := text
		if !strings.HasPrefix(whole, text) { // which may end with what ends all
			end = strings.TrimSuffix(text, t.named["eos_token"])
		}
		apart = apart || !strings.HasPrefix(whole, end)
		answers = append(answers, span{len(before), len(end)})
	}
	if apart {
		return all, nil
	}
	return []spoken{{whole, answers}}, nil
}

// encode returns the tokens of a text, and which of them are in answers.
func (s spoken) encode(t *tokenizer.Tokenizer) (ids []int, answers []bool) {
	ids = t.Encode(s.text, false)
	before := lengths(t, ids, s.text)
	if before == nil {
		before = func(end int) int { return common(ids, t.Encode(s.text[:end], false)) }
	}
	answers = make([]bool, len(ids))
	for _, a := range s.answers {
		for i, to := before(a.from), before(a.to); i < to; i++ {
			answers[i] = true
		}
	}
	return ids, answers
}

// lengths returns a function that counts the tokens before a byte of a text, by what each of them
// decodes to. It is nil if they do not decode to the text, as after a normalizer.
func lengths(t *tokenizer.Tokenizer, ids []int, text string) func(end int) int {
	stream := t.Stream(false)
	ends, at := make([]int, len(ids)), 0
	for i, id := range ids {
		part := stream.Next(id)
		if !strings.HasPrefix(text[at:], part) {
			return nil
		}
		at += len(part)
		ends[i] = at
	}
	if text[at:] != stream.End() {
		return nil
	}
	return func(end int) int {
		n, _ := slices.BinarySearch(ends, end+1)
		for n > 0 && n < len(ids) && ends[n-1] == end && (n == 1 && end == 0 ||
			n > 1 && ends[n-2] == end) {
			n-- // bytes of the character that the next token completes
		}
		return n
	}
}

// common returns how many tokens two texts have in common at their beginnings.
func common(a, b []int) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}
