# A command that does what its first word says; the task is on standard input and in RAGEN_TASK.
case $(printf %s "$RAGEN_TASK" | sed 's/.*"do": "\([a-z ]*\)".*/\1/') in
  input) cat ;;
  text) printf 'thinking\n{"no": JSON\nfour is good\n\n' ;;
  infinite) echo 1e999 ;;
  fail) echo '{"reward": 1}'; echo 'oh no' >&2; exit 3 ;;
  killed) kill -9 $$ ;;
  hang) sleep 61.25 & sleep 61.25 ;;
  leave) sleep 61.25 & echo $! ;;
  closed) exec >&- 2>&-; sleep 0.1 ;;
  flood) yes | head -c 3000000; echo; echo '[1, 2]' ;;
  long) yes | head -c 3000000 | tr -d '\n' ;;
  environment) env | grep -c -e SECRET -e LEAKED; printf '["%s", "%s", "%s", "%s"]\n' "$OPENAI_BASE_URL" "$OPENAI_API_KEY" "$ANTHROPIC_BASE_URL" "$ANTHROPIC_API_KEY" ;;
  *) wc -c | tr -d ' ' ;;
esac
