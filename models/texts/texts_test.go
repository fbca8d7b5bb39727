package texts_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models/texts"
	"github.com/euryale-ml/euryale/models/tokenizer"
)

// folder returns a folder with a tokenizer and a chat template.
func folder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS("../tokenizer/testdata/mistral")))
	write(t, dir, "special_tokens_map.json", `{"eos_token": "</s>"}`)
	write(t, dir, "chat_template.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>"+
		"{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
	return dir
}

func write(t *testing.T, dir, name, text string) (path string) {
	t.Helper()
	path = filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o666))
	return path
}

const chat = `{"messages": [{"role": "user", "content": "a b c"}, {"role": "assistant", ` +
	`"content": "d e"}, {"role": "user", "content": "f"}], "source": 7}`

// TestEachTokenOfATextIsATargetOnce: behind the first one, also where the context cuts it, and EOS
// ends it.
func TestEachTokenOfATextIsATargetOnce(t *testing.T) {
	dir := folder(t)
	const long = "the quick brown fox jumps over the lazy dog"
	for name, text := range map[string]string{
		"a.txt": "\ufeff" + long, "a.jsonl": "\n" + `{"text": "` + long + `", "id": 1}` + "\n",
		"b.jsonl": "\ufeff" + `{"text": "` + long + `"}`,
	} {
		path := write(t, dir, name, text)
		tok := require.Value(tokenizer.Load(dir))(t)
		want := append(tok.Encode(long, true), tok.EOS)
		for context := 1; context < len(want)+2; context++ {
			samples, cut, err := texts.Read(dir, context, path)
			require.NoError(t, err)
			var targets []int
			for _, s := range samples {
				at := len(targets)
				n := len(s.Tokens)
				require.Check(t, cut == 0 && n <= context && s.Count() == n &&
					slices.Equal(s.Tokens, want[at:at+n]) && s.Positions[n-1] == n-1,
					"context %d has a sample %v", context, s)
				targets = append(targets, s.Targets...)
			}
			require.Check(t, slices.Equal(targets, want[1:]), "%s, context %d: the targets are %v",
				name, context, targets)
		}
	}
}

// TestOnlyAnswersAreTargets: a conversation that is longer than the context loses its end, and one
// without an answer is no sample.
func TestOnlyAnswersAreTargets(t *testing.T) {
	dir := folder(t)
	tok := require.Value(tokenizer.Load(dir))(t)
	path := write(t, dir, "a.jsonl", chat+"\n"+`{"messages": [{"role": "user", "content": "x"}]}`)
	samples, cut, err := texts.Read(dir, 1000, path)
	require.That(t, err == nil && len(samples) == 1 && cut == 0, "%v, %d cut, %v", samples, cut,
		err)
	s := samples[0]
	var answer []int
	for i, target := range s.Targets {
		if target != texts.Ignored {
			answer = append(answer, target)
			require.Check(t, i+1 == len(s.Tokens) || s.Tokens[i+1] == target, "target %d is no "+
				"next token", i)
		}
	}
	require.Check(t, tok.Decode(answer, false) == "d e</>", "the targets are %q",
		tok.Decode(answer, false))
	all, first := len(s.Tokens), slices.IndexFunc(s.Targets, func(t int) bool { return t >= 0 })
	for context, want := range map[int]int{all - 1: 1, first + 1: 1, first: 0} {
		samples, cut, err = texts.Read(dir, context, path)
		require.Check(t, err == nil && len(samples) == want && cut >= 1, "context %d: %d samples, "+
			"%d cut, %v", context, len(samples), cut, err)
	}
}

// TestAConversationIsCutOnce: also where each of its answers is a sample, and a key that is null is
// none.
func TestAConversationIsCutOnce(t *testing.T) {
	dir := folder(t)
	write(t, dir, "chat_template.jinja", "{% for m in messages %}{{ m.content }}"+
		"{% if loop.last and m.role == 'assistant' %}!{% endif %}{% endfor %}")
	path := write(t, dir, "a.jsonl", `{"text": null, "messages": [{"role": "user", `+
		`"content": "a"}, {"role": "assistant", "content": "b c d"}, {"role": "user", `+
		`"content": "e"}, {"role": "assistant", "content": "f g h"}]}`)
	for context, want := range map[int]int{2: 1, 100: 0} {
		_, cut, err := texts.Read(dir, context, path)
		require.Equal(t, fmt.Sprintf("those cut at %d", context), cut, want)
		require.NoError(t, err)
	}
}

func TestWhatIsNoDocumentIsRefusedByItsLine(t *testing.T) {
	dir := folder(t)
	for line, want := range map[string]string{
		`{"texts": "a"}`:                 "line 2: it has neither text nor messages",
		`{"text": "a", "messages": []}`:  "or both",
		`{"text": ["a"]}`:                "line 2: text: ",
		`{"text": null}`:                 "line 2: it has neither",
		`text`:                           "line 2: invalid",
		`{"messages": "a"}`:              "line 2: messages: ",
		`{"messages": [], "tools": [1]}`: "line 2: tools would change the text",
		`{"messages": [{"content": []}]}`: "line 2: messages: content of message 0 is no text: " +
			"only texts",
		`{"messages": [{"content": "\ufdd0"}]}`:                    "which are no characters",
		`{"messages": [{"role": "assistant", "tool_calls": [1]}]}`: "tool_calls of message 0",
		`{"messages": [{"from": "human", "value": "a"}]}`:          "message 0 has no role",
		`{"messages": [{"role": "assistant", "content": null}]}`:   "message 0 has no content",
		`{"messages": [null]}`:                                     "message 0 has no role",
		"{\"text\": \"caf\xe9\"}":                                  "it is not UTF-8 text",
	} {
		_, _, err := texts.Read(dir, 9, write(t, dir, "a.jsonl", chat+"\n"+line))
		require.Fails(t, line, err, want)
	}
	_, _, err := texts.Read("../tokenizer/testdata/mistral", 9, write(t, dir, "b.jsonl", chat))
	require.Fails(t, "no template", err, "the folder has no chat template")
	_, _, err = texts.Read(dir, 0, write(t, dir, "c.txt", "a"))
	require.Fails(t, "a context of 0", err, backend.ErrArgument, "give 1 or more")
	_, _, err = texts.Read(t.TempDir(), 9)
	require.Fails(t, "no folder", err, "tokenizer.json")
}

// TestPackedSamplesAreWholeAndFillContexts: no token is lost, none is in another order, and of two
// packed samples no sample would fit into the other.
func TestPackedSamplesAreWholeAndFillContexts(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		context := 1 + r.IntN(12)
		var samples []texts.Sample
		for i := range r.IntN(30) {
			s := texts.Sample{}
			for at := range 1 + r.IntN(context) {
				s.Tokens, s.Targets = append(s.Tokens, i), append(s.Targets, i)
				s.Positions = append(s.Positions, at)
			}
			samples = append(samples, s)
		}
		found := map[int]int{}
		var room, last int // of the first with room
		for n, p := range require.Value(texts.Pack(samples, context))(t) {
			require.That(t, len(p.Tokens) <= context && len(p.Tokens) == len(p.Targets) &&
				len(p.Tokens) == len(p.Positions), "a packed sample is %v", p)
			for at, token := range p.Tokens {
				begins := at == 0 || p.Tokens[at-1] != token
				require.Check(t, (p.Positions[at] == 0) == begins, "%v: a document begins "+
					"elsewhere", p)
				found[token]++
			}
			if n > 0 && room >= len(p.Tokens) {
				t.Errorf("sample %d fits into the room of %d", n, last)
			}
			room, last = context-len(p.Tokens), n
		}
		for i, s := range samples {
			require.Check(t, found[i] == len(s.Tokens), "document %d has %d of %d tokens", i,
				found[i], len(s.Tokens))
		}
	}
}

func TestASampleThatIsLongerThanTheContextIsNotPacked(t *testing.T) {
	samples := []texts.Sample{{Tokens: make([]int, 2)}, {Tokens: make([]int, 3)}}
	require.Fails(t, "a context of 2", require.Err(texts.Pack(samples, 2)), backend.ErrArgument,
		"sample 1 has 3 tokens, more than the context of 2")
	require.Fails(t, "a context of -2", require.Err(texts.Pack(nil, -2)), "give 1 or more")
}

// TestSamplesSayOfWhichDocumentTheyAre: parts of a text, and answers of a conversation, also behind
// a document without a target.
func TestSamplesSayOfWhichDocumentTheyAre(t *testing.T) {
	dir := folder(t)
	write(t, dir, "chat_template.jinja", "{% for m in messages %}{{ m.content }}"+
		"{% if loop.last and m.role == 'assistant' %}!{% endif %}{% endfor %}")
	talk := `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ` +
		`"b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}`
	samples, _, err := texts.Read(dir, 8, write(t, dir, "a.jsonl", talk+"\n"+talk+
		"\n"+`{"messages": [{"role": "user", "content": "a"}]}`),
		write(t, dir, "b.txt", "a b c d e f g h i j k l"))
	var documents []int
	for _, s := range samples {
		documents = append(documents, s.Document)
	}
	require.Slices(t, err, documents, []int{0, 0, 1, 1, 3, 3})
}

func ExampleRead() {
	dir, _ := os.MkdirTemp("", "texts")
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "book.txt")
	_ = os.WriteFile(path, []byte("The quick brown fox jumps over the lazy dog."), 0o666)
	samples, _, err := texts.Read("../testdata/llama3", 8, path)
	targets := 0
	for _, s := range samples {
		targets += s.Count()
	}
	fmt.Println(len(samples), "samples of", targets, "targets,", err)
	packed, _ := texts.Pack(samples, 16)
	fmt.Println(len(packed), "samples, the positions of the first:", packed[0].Positions)
	// Output:
	// 3 samples of 21 targets, <nil>
	// 2 samples, the positions of the first: [0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7]
}
