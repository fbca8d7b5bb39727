package texts

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models/tokenizer"
)

// chats is what transformers makes of conversations: see testdata/make.py.
type chats struct {
	Templates map[string]string
	Named     map[string]map[string]string // special tokens, by folder
	Cases     []struct {
		Folder, Template    string
		Messages            []message
		Text, Prompt, Error string
		IDs, Answers        []int
	}
}

func readChats(t *testing.T) (c chats, tokenizers map[string]*tokenizer.Tokenizer) {
	t.Helper()
	text := require.Value(os.ReadFile("testdata/chats.json"))(t)
	require.NoError(t, json.Unmarshal(text, &c))
	tokenizers = map[string]*tokenizer.Tokenizer{}
	for folder, named := range c.Named {
		tok := require.Value(tokenizer.Load("../tokenizer/testdata/" + folder))(t)
		tokenizers[folder] = tok
		require.Check(t, fmt.Sprint(tok.Named) == fmt.Sprint(named), "%s has the special tokens "+
			"%v, and transformers %v", folder, tok.Named, named)
		for key, token := range map[string]string{"bos_token": "<s>", "eos_token": "</s>"} {
			if tok.Named[key] == "" {
				tok.Named[key] = token
			}
		}
	}
	return c, tokenizers
}

// saved loads a template from a folder that has it.
func saved(t *testing.T, source string, named map[string]string) *template {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, templateName), []byte(source), 0o666))
	return require.Value(loadTemplate(dir, named))(t)
}

// TestConversationsAreWrittenAndMaskedAsByTransformers: by templates that mark answers, and by the
// same ones without marks.
func TestConversationsAreWrittenAndMaskedAsByTransformers(t *testing.T) {
	c, tokenizers := readChats(t)
	compared, decoded := 0, 0
	for i, want := range c.Cases {
		tok := tokenizers[want.Folder]
		marked := c.Templates[want.Template]
		for _, source := range []string{marked, unmarked(marked)} {
			name := fmt.Sprintf("case %d: %s with %s, marked %v", i, want.Template, want.Folder,
				source == marked)
			chat := saved(t, source, tok.Named)
			text, _, err := chat.render(want.Messages, false)
			if want.Error != "" {
				require.Check(t, err != nil && strings.Contains(err.Error(), want.Error),
					"%s: %v, want %q", name, err, want.Error)
				continue
			}
			prompt, _, wrong := chat.render(want.Messages, true)
			all, failed := chat.speak(want.Messages)
			require.That(t, err == nil && wrong == nil && failed == nil, "%s: %v, %v, %v", name,
				err, wrong, failed)
			require.Check(t, text == want.Text && prompt == want.Prompt, "%s: it writes\n%q, %q, "+
				"want\n%q, %q", name, text, prompt, want.Text, want.Prompt)
			if len(all) > 1 { // each answer apart
				require.Check(t, want.Template == "thinking" && source != marked,
					"%s: %d samples", name, len(all))
				continue
			}
			if want.Folder == "mistral" && want.Template == "brackets" { // [/INST] takes a space
				want.Answers = slices.Clone(want.Answers)
				for at := range want.Answers[1:] {
					if want.IDs[at] == tok.Encode("[/INST]", false)[0] {
						want.Answers[at] = 0
					}
				}
			}
			ids, answers := all[0].encode(tok)
			mask := make([]int, len(answers))
			for i, is := range answers {
				if is {
					mask[i] = 1
				}
			}
			before := lengths(tok, ids, text)
			for _, a := range all[0].answers {
				again := common(ids, tok.Encode(text[:a.from], false))
				if before != nil { // decoded or encoded again, it is the same
					decoded++
					require.Equal(t, name+": the tokens before an answer", before(a.from), again)
				}
			}
			require.Check(t, slices.Equal(ids, want.IDs) && slices.Equal(mask, want.Answers),
				"%s: %q becomes\n%v\n%v, want\n%v\n%v", name, text, ids, mask, want.IDs,
				want.Answers)
			compared++
		}
	}
	require.Check(t, compared > 120 && decoded > 100, "only %d conversations were compared, and "+
		"%d places", compared, decoded)
}

// unmarked is a template that writes the same and does not mark answers.
func unmarked(source string) string {
	return strings.NewReplacer(" generation ", " if true ", " endgeneration ",
		" endif ").Replace(source)
}

// TestAnswersThatLaterMessagesChangeAreSamplesOfTheirOwn: each behind what the model would see.
func TestAnswersThatLaterMessagesChangeAreSamplesOfTheirOwn(t *testing.T) {
	chat := saved(t, `{% for m in messages %}({{ m.role }}:{% if m.role == 'assistant' and `+
		`loop.last %}[thought]{% endif %}{{ m.content }}){% endfor %}`+
		`{% if add_generation_prompt %}(assistant:{% endif %}`, nil)
	said := func(role, content string) message { return message{"role": role, "content": content} }
	all, err := chat.speak([]message{said("user", "a"), said("assistant", "b"), said("user", "c"),
		said("assistant", "d")})
	var parts []string
	for _, s := range all {
		parts = append(parts, s.text[:s.answers[0].from], s.text[s.answers[0].from:s.answers[0].to])
	}
	require.Slices(t, err, parts, []string{"(user:a)(assistant:", "[thought]b)",
		"(user:a)(assistant:b)(user:c)(assistant:", "[thought]d)"})
}

func TestTemplatesAreFoundWhereTransformersFindsThem(t *testing.T) {
	const list = `{"chat_template": [{"name": "tools", "template": "t"}, ` +
		`{"name": "default", "template": "default"}]}`
	for _, c := range []struct{ jinja, config, want string }{
		{"file", `{"chat_template": "config"}`, "file"},
		{"", `{"chat_template": "config"}`, "config"},
		{"", list, "default"},
		{"", `{}`, "the folder has no chat template"},
		{"", ``, "the folder has no chat template"},
		{"{% if %}", ``, "chat_template.jinja: "},
		{"{{ ('a' if true else 'b') }}", ``, "Unbalanced parenthesis"},
		{"{% include '/etc/passwd' %}", ``, "templates that read files are not supported"},
		{"{% include '/' %}", ``, "templates that read files are not supported"},
		{"{% extends '/' %}", ``, "templates that read files are not supported"},
		{"{{ raise_exception('no') }}", ``, "the template refuses it: no"},
	} {
		dir := t.TempDir()
		for name, text := range map[string]string{templateName: c.jinja, configName: c.config} {
			if text != "" {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
			}
		}
		text := ""
		chat, err := loadTemplate(dir, nil)
		if err == nil {
			text, _, err = chat.render(nil, false)
		}
		if err != nil {
			text = err.Error()
		}
		require.Check(t, strings.Contains(text, c.want), "%+v gives %q", c, text)
	}
}
